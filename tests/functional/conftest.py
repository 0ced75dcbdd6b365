"""A server to ask: one on civetta-nano started here, or any other by --base-url and --model.

python -m pytest tests/functional --base-url http://host:8080/v1 --model Qwen3.8-Flash-Next
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from queue import Empty, Queue
from typing import TYPE_CHECKING

import openai
import pytest
from asked import Asked

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite; they need its path on the command line."""
    group = parser.getgroup("functional")
    group.addoption("--base-url", help="OpenAI base URL of a running server, with /v1")
    group.addoption("--model", help="model to ask for; the server's first unless given")
    group.addoption("--api-key", default="none", help="key that the server wants")


@pytest.fixture(scope="session")
def asked(request: pytest.FixtureRequest) -> Iterator[Asked]:
    """The server under test."""
    url = request.config.getoption("--base-url", default=None)
    if url is not None:
        yield _client(
            url, request.config.getoption("--api-key"), request.config.getoption("--model")
        )
        return
    environment = {k: v for k, v in os.environ.items() if k not in ("HOST", "PORT")}
    command = [sys.executable, "-m", "civetta", "serve", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield _client(_url_of(process), "none", None)
        finally:
            process.terminate()
            process.wait(30)


def _client(url: str, key: str, model: str | None) -> Asked:
    client = openai.OpenAI(base_url=url, api_key=key, timeout=280.0, max_retries=0)
    return Asked(client=client, model=model or client.models.list().data[0].id)


def _url_of(process: subprocess.Popen[str]) -> str:
    """Wait for the line that names the address; the rest of what is printed is read and dropped."""
    lines: Queue[str] = Queue()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    seen = []
    while True:
        try:
            line = lines.get(timeout=START_S)
        except Empty:
            raise AssertionError(f"the server did not start: {seen}") from None
        seen.append(line)
        found = re.search(r"https?://\S+/v1", line)
        if found:
            return found[0]
