"""A server to ask: one on civetta-nano started here, or any other by --base-url and --model.

python -m pytest tests/functional --base-url http://host:8080/v1 --model Qwen3.8-Flash-Next
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest
from asked import Asked

from served import served

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    if url is None:
        with served() as own:
            yield _client(own, "none", None)
        return
    yield _client(url, request.config.getoption("--api-key"), request.config.getoption("--model"))


def _client(url: str, key: str, model: str | None) -> Asked:
    client = openai.OpenAI(base_url=url, api_key=key, timeout=280.0, max_retries=0)
    return Asked(client=client, model=model or client.models.list().data[0].id)
