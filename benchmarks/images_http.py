"""What a served model sees: held-out questions about pictures over HTTP, as docs/nano.md counts them.

    PYTHONPATH=src:. python benchmarks/images_http.py --url http://127.0.0.1:8080 [--count 1200]
        [--sessions 4] [--save FILE]

Each item goes as a PNG data URL to /v1/chat/completions, at temperature 0 with thinking off; an
answer counts when it is exact. Then the same question is asked about two pictures that differ in the
answer, each of them twice and in turn: the second time the server has the prompt's state, and the
answer must stay with its picture. Needs the repository, whose training folder makes the items.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from PIL import Image
from training.data.heldout import EvalItem, heldout
from training.trainer.evaluate_images import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 7
TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--count", type=int, default=1200)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    server = Server(a.url.rstrip("/").removesuffix("/v1"))
    items = heldout("vision", a.count, seed=SEED)
    began_s = time.monotonic()
    report = abilities(server, items, a.sessions)
    report |= {"exchanged": exchanged(server, items), "s": round(time.monotonic() - began_s, 1)}
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n", encoding="utf-8")


class Server:
    """Asks one question at a time a thread."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, item: EvalItem) -> tuple[str, int, int]:
        """The answer, the prompt's tokens, and how many of them were known already."""
        body = {
            "messages": [message_of(item)],
            "temperature": 0,
            "max_tokens": item.max_tokens,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        asked = Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(asked, timeout=TIMEOUT_S) as reply:
            done = json.load(reply)
        usage = done["usage"]
        known = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return done["choices"][0]["message"]["content"], usage["prompt_tokens"], known


def message_of(item: EvalItem) -> dict[str, Any]:
    """The user's message of an item, with its pictures as data URLs."""
    (message,) = item.messages
    left = iter(item.images)

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] != "image":
            return given
        out = io.BytesIO()
        Image.fromarray(next(left)).save(out, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    return {"role": message["role"], "content": [part(given) for given in message["content"]]}


def abilities(server: Server, items: list[EvalItem], sessions: int) -> dict[str, Any]:
    """Right answers of how many, a kind of question and size of picture."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    wrong = []
    with ThreadPoolExecutor(sessions) as pool:
        answers = pool.map(lambda item: server.ask(item)[0], items)
        for number, (item, answer) in enumerate(zip(items, answers, strict=True), 1):
            kind = kind_of(item)
            asked[kind] += 1
            if answer.strip() == str(item.expected):
                right[kind] += 1
            else:
                wrong.append({"item": item.index, "wanted": item.expected, "said": answer[:80]})
            if number % 100 == 0:
                print(number, file=sys.stderr)
    return {
        "right": {kind: f"{right[kind]} of {asked[kind]}" for kind in sorted(asked)},
        "wrong": wrong,
    }


def exchanged(server: Server, items: list[EvalItem]) -> dict[str, Any]:
    """Pairs of pictures under one question: right answers of the second asking, after a hit."""
    right = asked = hits = 0
    for pair in pairs(items):
        for item in pair:
            server.ask(item)
        for item in pair:
            answer, tokens, known = server.ask(item)
            asked += 1
            hits += known == tokens - 1
            right += answer.strip() == str(item.expected)
    return {"asked": asked, "whole prompt known": hits, "right": right}


def pairs(items: list[EvalItem], most: int = 40) -> Iterator[tuple[EvalItem, EvalItem]]:
    """Items of the same words and size of picture with different answers."""
    waiting: dict[str, list[EvalItem]] = defaultdict(list)
    found = 0
    for item in items:
        key = f"{item.prompt} {item.images[0].shape}"
        other = next((o for o in waiting[key] if o.expected != item.expected), None)
        if other is None:
            waiting[key].append(item)
            continue
        waiting[key].remove(other)
        yield other, item
        found += 1
        if found == most:
            return


if __name__ == "__main__":
    main()
