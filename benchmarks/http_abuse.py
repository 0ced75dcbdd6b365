"""What hostile clients cost the others: gaps between the tokens of a stream, memory of the server.

    python benchmarks/http_abuse.py [-m MODEL] [--seconds 8] [--save FILE]

A server of its own serves one reader without pause; beside it runs one kind of abuse at a time.
Printed for each: tokens a second of the reader, median, 99th percentile and longest gap between
its tokens (ms), the server's resident memory when the abuse ends (MiB), and what the abusers got.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FLAGS = ("-p", "0", "-j", "8", "-c", "2048", "--log-level", "error")
READER = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 1500, "temperature": 0}
NESTED = b'{"prompt":' + b"[" * 120 + b"]" * 120 + b"}"
MANY = b'{"prompt":[' + b"[]," * 130_000 + b"[]]}"
NUMBERS = b'{"prompt":[' + b"1," * 520_000 + b"1]}"
TEXT = b'{"prompt":"' + b"y" * ((8 << 20) - 64) + b'"}'
LARGE = b"z" * (9 << 20)


class Reader(threading.Thread):
    """Reads streams one after the other, and notes when each token came."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.over = False
        self.times_s: list[float] = []

    def run(self) -> None:
        while not self.over:
            with connected(self._address) as peer:
                peer.sendall(request("/v1/completions", json.dumps(READER).encode()))
                while not self.over and (data := peer.recv(65_536)):
                    self.times_s += [time.monotonic()] * data.count(b"data: {")
                    if b"[DONE]" in data:
                        self.times_s.append(-1.0)  # the gap to the next stream does not count
                        break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    report = {}
    with serving(a.model) as (process, address):
        for name, abuse in ABUSES.items():
            report[name] = measure(process, address, abuse, a.seconds)
            print(f"{name:28} {json.dumps(report[name])}", flush=True)
    if a.save:
        a.save.write_text(json.dumps(report, indent=2) + "\n")


def measure(
    process: subprocess.Popen[str],
    address: tuple[str, int],
    abuse: Callable[..., str] | None,
    seconds: float,
) -> dict[str, object]:
    """One kind of abuse for so many seconds, four abusers at a time."""
    reader = Reader(address)
    reader.start()
    time.sleep(1.0)
    began_s, answers = time.monotonic(), Counter()
    end_s = began_s + seconds

    def go() -> None:
        while time.monotonic() < end_s:
            try:
                answers[abuse(address, end_s)] += 1
            except OSError as error:
                answers[type(error).__name__] += 1

    abusers = [threading.Thread(target=go) for _ in range(4)] if abuse else []
    for thread in abusers:
        thread.start()
    time.sleep(max(end_s - time.monotonic(), 0))
    for thread in abusers:
        thread.join()
    reader.over = True
    reader.join()
    times = [t for t in reader.times_s if t < 0 or t >= began_s]
    gaps = sorted(b - a for a, b in itertools.pairwise(times) if a > 0 and b > 0)
    return {
        "tokens_s": round(len(gaps) / (time.monotonic() - began_s), 1),
        "gap_ms": round(statistics.median(gaps) * 1000, 2),
        "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1000, 1),
        "gap_max_ms": round(gaps[-1] * 1000, 1),
        "rss_mib": resident_mib(process.pid),
        "answers": dict(answers),
    }


def posts(body: bytes) -> Callable[..., str]:
    """An abuser that posts `body` and reads the answer."""

    def abuse(address: tuple[str, int], _end_s: float) -> str:
        with connected(address) as peer:
            peer.sendall(request("/v1/completions", body))
            return status(peer)

    return abuse


def header_flood(address: tuple[str, int], _end_s: float) -> str:
    """Headers without end."""
    with connected(address) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\n" + b"X-A: bbbbbbbb\r\n" * 4000)
        return status(peer)


def hangs_up(address: tuple[str, int], _end_s: float) -> str:
    """A stream that is left after its first bytes."""
    with connected(address) as peer:
        peer.sendall(request("/v1/completions", json.dumps({**READER, "prompt": "q"}).encode()))
        return status(peer)


def reads_slowly(address: tuple[str, int], end_s: float) -> str:
    """Sixteen streams, a byte a second each."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(connected(address, receive_bytes=2048)) for _ in range(16)]
        for peer in peers:
            peer.sendall(request("/v1/completions", json.dumps(READER).encode()))
        while time.monotonic() < end_s:
            for peer in peers:
                peer.recv(1)
            time.sleep(1)
    return "16 slow"


def many_short(address: tuple[str, int], _end_s: float) -> str:
    """Health, over and over, on one connection."""
    with connected(address) as peer:
        for _ in range(100):
            peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            got = status(peer)
        return got


ABUSES: dict[str, Callable[..., str] | None] = {
    "nothing": None,
    "short requests": many_short,
    "9 MiB, over the limit": posts(LARGE),
    "8 MiB of text, as a prompt": posts(TEXT),
    "130,000 arrays": posts(MANY),
    "520,000 numbers": posts(NUMBERS),
    "120 levels": posts(NESTED),
    "header flood": header_flood,
    "clients that hang up": hangs_up,
    "64 readers, a byte a second": reads_slowly,
    "nothing again": None,
}


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def status(peer: socket.socket) -> str:
    """The status of the response that comes, its head alone read."""
    return peer.recv(4096)[9:12].decode() or "closed"


@contextlib.contextmanager
def connected(
    address: tuple[str, int], *, receive_bytes: int | None = None
) -> Iterator[socket.socket]:
    with socket.socket() as peer:
        if receive_bytes is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        peer.settimeout(60)
        peer.connect(address)
        yield peer


def resident_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024


@contextlib.contextmanager
def serving(model: str | None) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A server of our own, once it is ready."""
    command = [sys.executable, "-m", "civetta", "serve", *FLAGS, *(["-m", model] if model else [])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if line.startswith("civetta serves"))
            threading.Thread(target=process.stderr.read, daemon=True).start()  # no pipe fills
            host, port = line.split(" at http://")[1].split("/v1;")[0].split(":")
            yield process, (host, int(port))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
