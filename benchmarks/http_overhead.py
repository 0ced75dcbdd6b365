"""What HTTP costs a token: streams of an engine that does nothing, read by another process.

    python benchmarks/http_overhead.py [--streams 8] [--tokens 4000] [--rounds 3] [--pace-ms 0]
                                       [--profile PREFIX] [--save FILE]

The server is a process of its own with civetta's application, connection and outbox; a thread
takes the engine's place and puts one token of every stream into its outbox a round, as the step
thread does. With --pace-ms 0 it goes as fast as outboxes take it; else a round lasts so long, as
with a model. Clients are another process that reads and drops the bytes.

Per token: CPU time of the server process (all of its threads, the engine's thread taken off) and,
at full speed, the time on the clock. Three dialects: completions, chat (the reply is parsed), and
llama.cpp's. The bound of this project is 100 us a token at 8 streams on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import multiprocessing
import pstats
import resource
import selectors
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from civetta.api.app import build_app
from civetta.api.connection import ConnectionConfig
from civetta.chat.template import ChatTemplate
from civetta.chat.tokenizer import Tokenizer
from civetta.chat.vocabulary import byte_alphabet, read_gguf
from civetta.cli.serve import listen
from civetta.engine.outbox import Outbox, OutboxStream
from civetta.engine.protocol import EngineStats, Finished, ModelInfo, Started, TokenEvent
from civetta.options import ServerOptions, Settings
from civetta.types import FinishReason, Usage

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/completion": {"prompt": "x"},
    "/v1/responses": {"input": "x", "reasoning": {"effort": "none"}},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1 << 20},
}


class IdleEngine:
    """Gives each of `streams` requests `tokens` tokens, one a round, on one thread."""

    def __init__(self, streams: int, tokens: int, pace_s: float) -> None:
        self._streams, self._tokens, self._pace_s = streams, tokens, pace_s
        self._boxes: list[Outbox] = []
        self._full = threading.Event()
        self.thread_cpu_s = self.wall_s = 0.0
        self.tokenizer = _tokenizer()
        self.template = ChatTemplate()
        self.info = ModelInfo(
            model_id="idle", path="idle", context_tokens=1 << 20, vocab_size=300, parameters=0,
            format="none", device="cpu", dtype="f32", created_s=0, has_tokenizer=True,
        )  # fmt: skip

    def submit(self, _request: object) -> OutboxStream:
        box = Outbox(max_unread=1 << 30)
        self._boxes.append(box)
        if len(self._boxes) == self._streams:
            self._full.set()
        return OutboxStream(box, lambda: None)

    def serve_once(self) -> None:
        """Wait for all streams, then give them their tokens."""
        self._full.wait()
        self._full.clear()
        boxes, self._boxes = self._boxes, []
        began_s, cpu_s = time.monotonic(), time.thread_time()
        for box in boxes:
            box.put(Started(prompt_tokens=1, cached_tokens=0))
        for index in range(self._tokens):
            for box in boxes:
                box.put(TokenEvent(token_id=97, text="abcd"))
            if self._pace_s:
                left_s = began_s + (index + 1) * self._pace_s - time.monotonic()
                time.sleep(max(left_s, 0))
            elif index % 64 == 63:  # no more ahead than a socket's buffer: readers set the pace
                while any(len(box._events) > 256 for box in boxes):
                    time.sleep(0.0002)
        usage = Usage(prompt_tokens=1, completion_tokens=self._tokens)
        for box in boxes:
            box.put(Finished(reason=FinishReason.STOP, usage=usage))
        self.thread_cpu_s = time.thread_time() - cpu_s
        self.wall_s = time.monotonic() - began_s

    def views(self) -> tuple[()]:
        return ()

    def abort(self, _request_id: str) -> bool:
        return False

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    report = {
        "streams": a.streams,
        "tokens": a.tokens,
        "rounds": a.rounds,
        "pace_ms": a.pace_ms,
        "us_a_token": {path: measure(a, path) for path in BODIES},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n")


def measure(a: argparse.Namespace, path: str) -> dict[str, list[float] | float]:
    """CPU and clock microseconds a token, every round and the median."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    client = multiprocessing.get_context("spawn").Process(target=read_all, args=(there,))
    client.start()
    engine = IdleEngine(a.streams, a.tokens, a.pace_ms / 1000)
    options = ServerOptions(port=0)
    server = uvicorn.Server(ConnectionConfig(build_app(engine, Settings(server=options)), options))
    listener = listen(options)
    profile = cProfile.Profile() if a.profile else None

    def run() -> None:
        with profile or contextlib.nullcontext():
            server.run(sockets=[listener])

    loop = threading.Thread(target=run)
    loop.start()
    cpu, wall, count = [], [], a.streams * a.tokens
    for _ in range(a.rounds):
        body = json.dumps({**BODIES[path], "stream": True}).encode()
        here.send((listener.getsockname(), path, body, a.streams))
        before_s = _cpu_s()
        began_s = time.monotonic()
        engine.serve_once()
        here.recv()
        wall.append(round((time.monotonic() - began_s) / count * 1e6, 2))
        cpu.append(round((_cpu_s() - before_s - engine.thread_cpu_s) / count * 1e6, 2))
    here.send(None)
    server.should_exit = True
    loop.join()
    client.join()
    if profile:
        with a.profile.with_name(a.profile.name + path.replace("/", "_")).open("w") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(40)
    return {
        "cpu": cpu,
        "cpu_median": statistics.median(cpu),
        "clock": wall,
        "clock_median": statistics.median(wall),
    }


def read_all(orders: Connection) -> None:
    """The clients: open the streams, read each to its end."""
    while (order := orders.recv()) is not None:
        address, path, body, streams = order
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}"
        )
        waiting = selectors.DefaultSelector()
        for _ in range(streams):
            peer = socket.create_connection(address[:2])
            peer.sendall(head.encode() + b"\r\n\r\n" + body)
            waiting.register(peer, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select():
                if not key.fileobj.recv(1 << 16):
                    waiting.unregister(key.fileobj)
                    key.fileobj.close()
        orders.send("done")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _tokenizer() -> Tokenizer:
    tokens = [*byte_alphabet(), "<|im_end|>"]
    return Tokenizer(
        read_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "qwen35",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.token_type": [1] * 256 + [3],
                "tokenizer.ggml.eos_token_id": 256,
            }
        )
    )


if __name__ == "__main__":
    main()
