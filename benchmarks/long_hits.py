"""Rows 6 and 7 of the cache's cases at full length: long prompts, drafts and hits, against cold servers.

    PYTHONPATH=src:. python benchmarks/long_hits.py [--repeat 18000] [--needle 30000] [--nano 15000]
        [--threads 1] [--save FILE]

- "repeat": a prompt twice, with `--speculative mtp --draft-tokens 3` and without drafts. The first
  repeat has to hit as deep with drafts as without, and all replies have to be a cold server's.
- "needle": a fact amid a long prompt with tools, asked for in two turns. What a server with a cache
  and three drafts answers has to be, byte for byte, what three others answer: without drafts,
  without the cache, without either.

Two models: the tiny checkpoint with its context raised to 49,152, whose random weights find nothing,
for the length; and the embedded one near its limit of 16,384, which has to find the fact.
Over the HTTP application, greedy. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
from training.data.heldout import heldout

from civetta.api.app import build_app
from civetta.decode import purse
from civetta.engine.load import load_engine
from civetta.model.tiny import write_tiny
from civetta.options import CacheOptions, DraftingOptions, ModelOptions, Settings

CONTEXT = 49_152
MTP = DraftingOptions(speculative="mtp", draft_tokens=3)
SERVERS = {
    "mtp cached": (MTP, "on"),
    "plain cached": (DraftingOptions(), "on"),
    "mtp cold": (MTP, "off"),
    "plain cold": (DraftingOptions(), "off"),
}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
NO_END = {str(token): -100 for token in range(256, 288)}
"""The tiny model's control tokens: its reply goes on to the limit."""

FACT = "One fact after another is told here, and none of them matters. "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=18_000)
    parser.add_argument("--needle", type=int, default=30_000)
    parser.add_argument("--nano", type=int, default=15_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    logging.getLogger("civetta").setLevel(logging.CRITICAL)
    purse.START_ROUNDS = purse.MOST_ROUNDS = 10**9  # drafts go on whether they pay or not
    with tempfile.TemporaryDirectory() as folder:
        tiny = ModelOptions(model=str(deep_tiny(Path(folder))), threads=a.threads)
        nano = ModelOptions(threads=a.threads)
        report = {
            "tiny, repeat": repeat(tiny, a.repeat),
            "nano, repeat": repeat(nano, a.nano),
            "tiny, needle": two_turns(tiny, tiny_talk(a.needle), logit_bias=NO_END),
            "nano, needle": nano_needle(nano, a.nano),
        }
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n")
    return 0 if all(part["ok"] for part in report.values()) else 1


def deep_tiny(folder: Path) -> Path:
    """The tiny checkpoint with a context of CONTEXT tokens."""
    write_tiny(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config)["max_position_embeddings"] = CONTEXT
    path.write_text(json.dumps(config))
    return folder


class Server:
    """One engine behind the HTTP application."""

    def __init__(self, model: ModelOptions, name: str) -> None:
        drafting, cache = SERVERS[name]
        settings = Settings(model=model, drafting=drafting, cache=CacheOptions(cache=cache))
        self._engine = load_engine(settings)
        self._app = build_app(self._engine, settings)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async def call() -> dict[str, Any]:
            transport = httpx2.ASGITransport(app=self._app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                response = await client.post(path, json=body, timeout=None)
                assert response.status_code == 200, response.text
                return response.json()

        return asyncio.run(call())

    def close(self) -> None:
        self._engine.close()


def repeat(model: ModelOptions, n_tokens: int) -> dict[str, Any]:
    ids = [(i * i * 31 + i) % 200 + 1 for i in range(n_tokens)]
    body = {"prompt": ids, "max_tokens": 32, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    cached, choices, drafts = {}, [], {}
    for name in SERVERS:
        server = Server(model, name)
        for _ in range(2 if name.endswith("cached") else 1):
            reply = server.post("/v1/completions", body)
            cached.setdefault(name, []).append(cached_of(reply))
            choices.append(reply["choices"])
            drafts[name] = reply["timings"].get("draft_n", 0)
        server.close()
    same = all(choice == choices[0] for choice in choices)
    hits = [0, n_tokens - 1]
    return {
        "prompt_tokens": n_tokens,
        "cached": cached,
        "drafts": drafts,
        "replies": len(choices),
        "replies_equal": same,
        "ok": same and cached["mtp cached"] == cached["plain cached"] == hits,
    }


def two_turns(
    model: ModelOptions, turns: list[list[dict[str, Any]]], **more: Any
) -> dict[str, Any]:
    """`turns`: what is said in each; the reply of the first stands between them."""
    found: dict[str, Any] = {}
    for name in SERVERS:
        server, messages, rows = Server(model, name), [], []
        for turn in turns:
            messages = [*messages, *turn]
            body = {
                "messages": messages,
                "tools": TOOLS,
                "max_tokens": 48,
                "temperature": 0,
                "chat_template_kwargs": {"enable_thinking": False},
                **more,
            }
            began_s = time.monotonic()
            reply = server.post("/v1/chat/completions", body)
            message = reply["choices"][0]["message"]
            messages = [*messages, {"role": "assistant", "content": message["content"] or "."}]
            rows.append(
                {
                    "prompt_tokens": reply["usage"]["prompt_tokens"],
                    "cached_tokens": cached_of(reply),
                    "drafts": reply["timings"].get("draft_n", 0),
                    "seconds": round(time.monotonic() - began_s, 2),
                    "choice": reply["choices"][0],
                }
            )
        server.close()
        found[name] = rows
    said = {name: [without_ids(row.pop("choice")) for row in rows] for name, rows in found.items()}
    same = all(choices == said["plain cold"] for choices in said.values())
    deep = all(
        found[name][1]["cached_tokens"] >= found[name][0]["prompt_tokens"] - 16
        for name in ("mtp cached", "plain cached")
    )
    return {
        **found,
        "said": said["plain cold"],
        "replies_equal": same,
        "second_turn_hits": deep,
        "ok": same and deep,
    }


def tiny_talk(n_tokens: int) -> list[list[dict[str, Any]]]:
    half = FACT * (n_tokens // (2 * len(FACT)))  # its tokenizer has little more than bytes
    first = [
        {"role": "system", "content": "You are careful."},
        {"role": "user", "content": f"{half}The word is plum. {half}What is the word?"},
    ]
    return [first, [{"role": "user", "content": "Say it again."}]]


def nano_needle(model: ModelOptions, n_tokens: int) -> dict[str, Any]:
    (item,) = heldout("retrieval", 1, seed=11, tokens=n_tokens)
    question = {"role": "user", "content": str(item.messages[-1]["content"])[-200:]}
    result = two_turns(model, [item.messages, [question]])
    first = result["said"][0]["message"]["content"] or ""
    found = str(item.expected) in first
    return {
        **result,
        "expected": str(item.expected),
        "fact_found": found,
        "ok": result["ok"] and found,
    }


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without the ids of its calls, which are new each time."""
    calls = choice["message"].get("tool_calls") or []
    for call in calls:
        call.pop("id")
    return choice


def cached_of(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


if __name__ == "__main__":
    sys.exit(main())
