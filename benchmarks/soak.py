"""Soak: clients that chat, fork, stall and leave at random; then everything has to be given back.

    python benchmarks/soak.py [--minutes 30] [--clients 8] [--sessions 4] [--round-s 20] [--save FILE]

Serves the embedded model over HTTP in this process. In each round `--clients` threads hold
conversations for `--round-s` seconds: streamed and buffered, some cut off in mid-stream, some ended
by DELETE, some with a time limit, some that share a prompt. Between rounds, with nothing running,
threads, file descriptors, resident memory and session tokens are counted. Fails (exit 1) when a
request or a session is left, when descriptors grow, when there are more threads than at the start
and the event loop's pool of workers, when pages are missing at the end, when memory of the last
third is more than --grow-mb above that of the second, when a token of the last third costs 10 % more
than one of the second, or when an answer is none of the expected ones. Processor time, clients'
included, is what tells throughput where other programs share the machine; tokens are those computed,
without those found in the cache. A token's processor time still follows what the others do to caches,
memory and the core's second thread; so the same piece of work, which is none of civetta's, is timed
after each round (`yardstick_ms`), and a token's cost is its processor time over that (`yardsticks`).
The cache's budget (--cache-mb) is small, so that it is full from an early round on.

What grows without being used is told from what is held: `heap_used_mb` is what the C library has
given out and not got back, `heap_free_mb` what it keeps for later, `blocks` the interpreter's own
small objects, `nodes` what the cache's index knows, `remembered` how much of it leads to states that
are gone (in symbols of 8 bytes, bounded); `rss_trimmed_mb` is resident memory after the last round,
without what the C library kept.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import http.client
import json
import logging
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
import uvicorn

from civetta.api.app import build_app
from civetta.engine.load import load_engine
from civetta.options import CacheOptions, EngineOptions, ModelOptions, ServerOptions, Settings

SHARED = "You are a careful assistant. " * 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--round-s", type=float, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-mb", type=int, default=256)
    parser.add_argument("--grow-mb", type=float, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    logging.getLogger("civetta").setLevel(logging.CRITICAL)
    settings = Settings(
        model=ModelOptions(threads=a.threads, context=16_384),
        engine=EngineOptions(sessions=a.sessions, max_pending=4, request_timeout_ms=60_000),
        cache=CacheOptions(cache_ram_bytes=a.cache_mb << 20),
        server=ServerOptions(max_connections=64),
    )
    engine = load_engine(settings)
    with serving(build_app(engine, settings)) as port:
        rounds: list[dict] = []
        threads_at_start = threading.active_count()
        end_s = time.monotonic() + 60 * a.minutes
        while time.monotonic() < end_s:
            rounds.append(play_round(a, engine, port, len(rounds)))
            print(json.dumps(rounds[-1]), flush=True)
        trimmed_mb = trimmed()
    engine.close()
    stats = engine.stats()
    report = {
        "minutes": a.minutes,
        "clients": a.clients,
        "sessions": a.sessions,
        "requests": sum(sum(row["outcomes"].values()) for row in rounds),
        "outcomes": dict(sum((Counter(row["outcomes"]) for row in rounds), Counter())),
        "threads_at_start": threads_at_start,
        "rss_trimmed_mb": trimmed_mb,
        "pages_missing": stats.pages_total - stats.pages_free,
        "put_back": stats.put_back_total,
        "rounds": rounds,
    }
    report["faults"] = faults(a, rounds, report)
    print(json.dumps({key: value for key, value in report.items() if key != "rounds"}, indent=2))
    if a.save:
        a.save.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["faults"] else 0


@contextlib.contextmanager
def serving(app):
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    server.capture_signals = contextlib.nullcontext
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def play_round(a, engine, port: int, number: int) -> dict[str, object]:
    before = engine.stats()
    outcomes: Counter[str] = Counter()
    end_s = time.monotonic() + a.round_s
    clients = [
        threading.Thread(
            target=Client(port, random.Random(f"{a.seed}/{number}/{i}"), outcomes).play,
            args=(end_s,),
        )
        for i in range(a.clients)
    ]
    began_s, cpu_began_s = time.monotonic(), time.process_time()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    spent_s = time.monotonic() - began_s
    quiet_s = time.monotonic() + 30
    while (engine.stats().running or engine.stats().waiting) and time.monotonic() < quiet_s:
        time.sleep(0.05)
    gc.collect()
    time.sleep(0.2)  # connections that were cut are noticed by the event loop
    after = engine.stats()
    cpu_s, measure_ms = time.process_time() - cpu_began_s, yardstick_ms()
    cached = after.cached_tokens_total - before.cached_tokens_total
    generated = after.generated_tokens_total - before.generated_tokens_total
    tokens = generated + after.prompt_tokens_total - before.prompt_tokens_total
    return {
        "round": number,
        "outcomes": dict(outcomes),
        "running": after.running,
        "waiting": after.waiting,
        "session_tokens": after.session_tokens,
        "pages_held": after.pages_total - after.pages_free,
        "threads": threading.active_count(),
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "rss_mb": round(rss_bytes() / 1e6, 1),
        "tokens_s": round(tokens / spent_s, 1),
        "cpu_s": round(cpu_s, 3),
        "cpu_ms_a_token": round(1e3 * cpu_s / tokens, 4),
        "yardstick_ms": round(measure_ms, 3),
        "yardsticks": round(1e3 * cpu_s / tokens / measure_ms, 5),
        "generated": generated,
        "computed_prompt_tokens": tokens - generated,
        "cached_tokens": cached,
        **held(engine),
    }


def yardstick_ms() -> float:
    """Processor time of a fixed piece of work, half tensors and half Python; of nine, the median."""
    left, right = torch.ones(256, 1024), torch.ones(1024, 1024)
    times = []
    for _ in range(9):
        began_s = time.thread_time()
        for _ in range(4):
            left @ right
        sum(i * i for i in range(60_000))
        times.append(1e3 * (time.thread_time() - began_s))
    return statistics.median(times)


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def held(engine) -> dict[str, object]:
    """What is held now: by the C library, the interpreter and the cache's index."""
    found: dict[str, object] = {"blocks": sys.getallocatedblocks()}
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
    if mallinfo is not None:
        mallinfo.restype = Mallinfo
        info = mallinfo()
        found["heap_used_mb"] = round((info.uordblks + info.hblkhd) / 1e6, 1)
        found["heap_free_mb"] = round(info.fordblks / 1e6, 1)
    cache = engine._loop._cache
    index, nodes = cache._index, 0
    stack = [index._root]
    while stack:
        nodes += 1
        stack.extend(stack.pop().children.values())
    stats = engine.stats().cache
    return {
        **found,
        "nodes": nodes,
        "remembered": index.remembered,
        "states": stats.entries_ram,
        "cache_mb": round(stats.ram_bytes / 1e6, 1),
    }


def trimmed() -> float | None:
    """Resident memory once the C library has given back what it keeps for later; None without."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return None
    trim(0)
    return round(rss_bytes() / 1e6, 1)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def faults(a, rounds, report) -> list[str]:
    found = [
        f"round {row['round']} left {row['running']} running, {row['waiting']} waiting,"
        f" {row['session_tokens']} tokens"
        for row in rounds
        if row["running"] or row["waiting"] or row["session_tokens"]
    ]
    if report["pages_missing"]:
        found.append(f"{report['pages_missing']} pages are missing after the end")
    pool = min(32, (os.cpu_count() or 1) + 4)  # what asyncio gives its default executor
    most = max(row["threads"] for row in rounds)
    if most > report["threads_at_start"] + pool:
        found.append(f"{most} threads after {report['threads_at_start']} at the start")
    third = len(rounds) // 3
    if third:
        middle, last = rounds[third : 2 * third], rounds[-third:]
        for key, allowed in (("fds", 2), ("rss_mb", a.grow_mb), ("heap_used_mb", a.grow_mb / 2)):
            if key not in last[0]:
                continue
            grown = statistics.median(r[key] for r in last) - statistics.median(
                r[key] for r in middle
            )
            if grown > allowed:
                found.append(f"{key} grew by {grown:g} from the second third to the last")
        costs = [statistics.median(r["yardsticks"] for r in part) for part in (middle, last)]
        if costs[1] > 1.1 * costs[0]:
            found.append(f"a token's cost went from {costs[0]:g} to {costs[1]:g} yardsticks")
    bad = {key for key in report["outcomes"] if key.startswith("unexpected")}
    return found + sorted(bad)


class Client:
    """One user: conversations of a few turns, and every way of leaving them."""

    def __init__(self, port: int, rng: random.Random, outcomes: Counter[str]) -> None:
        self._port, self._rng, self._outcomes = port, rng, outcomes

    def play(self, end_s: float) -> None:
        messages: list[dict[str, str]] = []
        while time.monotonic() < end_s:
            if not messages or len(messages) > 8 or self._rng.random() < 0.2:
                messages = self._opening()
            messages = [*messages, {"role": "user", "content": self._question()}]
            answer = self._ask(messages)
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
            elif self._rng.random() < 0.5:
                messages.pop()

    def _opening(self) -> list[dict[str, str]]:
        if self._rng.random() < 0.5:
            return [{"role": "system", "content": SHARED + str(self._rng.randrange(3))}]
        return []

    def _question(self) -> str:
        a, b = self._rng.randrange(100), self._rng.randrange(100)
        filler = "One fact is not asked for. " * self._rng.choice((0, 0, 5, 60))
        return f"{filler}What is {a}+{b}?"

    def _ask(self, messages) -> str | None:
        way = self._rng.choices(
            ("stream", "whole", "cut", "delete", "early", "cold"), (5, 3, 2, 1, 1, 1)
        )[0]
        body = {
            "messages": messages,
            "max_tokens": self._rng.choice((8, 32, 96)),
            "temperature": 0,
            "stream": way in ("stream", "cut", "delete"),
            "cache_prompt": way != "cold",
            "chat_template_kwargs": {"enable_thinking": False},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            outcome, answer = self._talk(connection, way, body)
        except OSError as error:
            outcome, answer = f"unexpected {type(error).__name__}", None
        finally:
            connection.close()
        self._outcomes[outcome] += 1
        return answer

    def _talk(self, connection, way: str, body) -> tuple[str, str | None]:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        if way == "early":  # gone before anything came: while queued or in the prefill
            time.sleep(self._rng.random() * 0.2)
            return "left early", None
        response = connection.getresponse()
        if response.status == 429:
            response.read()
            time.sleep(0.05)
            return "busy", None
        if response.status == 400:  # the conversation outgrew the context
            response.read()
            return "too long", None
        if response.status != 200:
            return f"unexpected {response.status} {response.read()[:200]!r}", None
        if not body["stream"]:
            message = json.loads(response.read())["choices"][0]["message"]
            return "whole", message["content"] or ""
        return self._listen(response, way)

    def _listen(self, response, way: str) -> tuple[str, str | None]:
        text, leave_after = "", self._rng.randrange(1, 12)
        for number, line in enumerate(iter(response.readline, b"")):
            if way == "cut" and number >= leave_after:
                return "cut", None
            if way == "delete" and number == leave_after:
                self._delete(response.headers["X-Request-ID"])
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    aborted = chunk["error"]["code"] == "request_aborted"
                    return ("deleted" if aborted else f"unexpected {chunk['error']}"), None
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
        return "stream", text

    def _delete(self, request_id: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("DELETE", f"/v1/requests/{request_id}")
        connection.getresponse().read()
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
