"""`civetta serve` as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from queue import Empty, Queue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 60.0


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """A server on a free port, by default on civetta-nano; yields its base URL, with /v1."""
    environment = {k: v for k, v in os.environ.items() if k not in ("HOST", "PORT")}
    command = [sys.executable, "-m", "civetta", "serve", "-p", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield _url_of(process)
        finally:
            process.terminate()
            process.wait(30)


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
