"""Random conversations of several users over one cache; every reply has to be a cold server's.

    python tests/api/talks.py [--users 4] [--phases 6] [--turns 8] [--seed 0] [--model PATH]

A program, and what test_talks.py runs a small round of. Users talk at the same time, over HTTP's
application, to a server with little memory for states and a folder on disk. Each turn is one of
KINDS, drawn by the user's own random numbers. After each phase the server is closed and another one
opens the folder. In the end each request is sent to a server without a cache, alone: the choices
have to be the same but for ids of calls, log-probabilities included; what an interrupted stream gave
is the beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pictures
from api.serving import RawClient, app_of, http, request
from civetta.engine.load import load_engine
from civetta.options import CacheOptions, DraftingOptions, EngineOptions, ModelOptions, Settings

KINDS = (
    "go on", "again", "edit", "rewind", "fork", "branch", "tools", "interrupted", "image",
    "other image",
)  # fmt: skip
PICTURES = [
    pictures.data_url(pictures.encoded(pictures.flat(64, 64, colour)))
    for colour in ("red", "blue", "green")
]
WORDS = ["plum", "river", "seven", "lamp", "quick", "stone", "owl", "paper", "north", "green"]
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
PATH = "/v1/chat/completions"
DELTA = '"content"'


class Log:
    """What was asked and answered: (body, choices), and (body, text) of what was interrupted."""

    def __init__(self) -> None:
        self.whole: list[tuple[dict, list]] = []
        self.parts: list[tuple[dict, str]] = []
        self.kinds: Counter[str] = Counter()
        self.cached = self.prompt = 0


class User:
    """One user's conversations; `play` takes turns with a server."""

    def __init__(self, number: int, seed: int, log: Log, max_tokens: int) -> None:
        self._rng = random.Random(f"{seed}/{number}")
        self._log, self._max_tokens = log, max_tokens
        opening = "Be brief, and think of the owl. " * (4 + 8 * (number % 2))
        self._talks = [[{"role": "system", "content": opening}]]
        self._asked: dict | None = None
        self._pending = list(KINDS)

    async def play(self, app: Any, turns: int) -> None:
        async with http(app) as client:
            for _ in range(turns):
                await self._turn(app, client)

    async def _turn(self, app: Any, client: Any) -> None:
        talk = list(self._rng.choice(self._talks[-3:]))
        kind = self._next_kind(talk)
        self._log.kinds[kind] += 1
        if kind == "again":
            await self._ask(client, self._asked)
            return
        if kind == "branch":  # three ways on from one history, at the same time
            ways = [self._body([*talk, self._says(f"way {n}")]) for n in range(3)]
            replies = await asyncio.gather(*(self._ask(client, way) for way in ways))
            self._keep(ways[0], replies[0])
            return
        body = self._body(self._changed(talk, kind))
        if kind == "interrupted":
            text = await self._interrupt(app, body)
            if self._rng.random() < 0.5 and text:
                body["messages"].append({"role": "assistant", "content": text})
            self._talks.append(body["messages"])
            return
        self._keep(body, await self._ask(client, body))

    def _next_kind(self, talk: list[dict]) -> str:
        """Each kind once in random order, as far as the conversation allows it; then any."""
        possible = [kind for kind in KINDS if self._possible(kind, talk)]
        wanted = [kind for kind in self._pending if kind in possible]
        kind = self._rng.choice(wanted or possible)
        if kind in self._pending:
            self._pending.remove(kind)
        return kind

    def _possible(self, kind: str, talk: list[dict]) -> bool:
        said = sum(message["role"] == "user" for message in talk)
        if kind == "other image":
            return any(isinstance(message["content"], list) for message in talk)
        least = {"edit": 1, "rewind": 2, "fork": 1}.get(kind, 0)
        return said >= least and (kind != "again" or self._asked is not None)

    def _changed(self, talk: list[dict], kind: str) -> list[dict]:
        """The history of a turn of that kind, up to what the user says."""
        users = [n for n, message in enumerate(talk) if message["role"] == "user"]
        if kind == "edit":
            at = self._rng.choice(users)
            talk[at] = self._says("edited")
            return talk if talk[-1]["role"] == "user" else [*talk, self._says()]
        if kind == "rewind":
            return [*talk[: users[-2]], self._says("rewound")]
        if kind == "fork":
            return [*talk[: self._rng.choice(users)], self._says("forked")]
        if kind == "tools":
            return [*talk, self._says(), *self._tool_cycle(), *self._tool_cycle()]
        if kind == "image":
            return [*talk, self._says(image=self._rng.choice(PICTURES))]
        if kind == "other image":
            at = self._rng.choice([n for n in users if isinstance(talk[n]["content"], list)])
            shown = talk[at]["content"][0]["image_url"]["url"]
            others = [picture for picture in PICTURES if picture != shown]
            talk[at] = self._says(image=self._rng.choice(others))
            return [*talk[: at + 1], *talk[at + 1 :], self._says()][: len(talk) + 1]
        return [*talk, self._says()]

    def _says(self, *words: str, image: str | None = None) -> dict:
        drawn = self._rng.choices(WORDS, k=self._rng.choice((1, 6, 30)))
        text = " ".join((*words, *drawn))
        if image is None:
            return {"role": "user", "content": text}
        parts = [
            {"type": "image_url", "image_url": {"url": image}},
            {"type": "text", "text": text},
        ]
        return {"role": "user", "content": parts}

    def _tool_cycle(self) -> list[dict]:
        call_id = f"c{self._rng.randrange(1000)}"
        arguments = json.dumps({"at": self._rng.choice(WORDS)})
        function = {"name": "look", "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        result = " ".join(self._rng.choices(WORDS, k=8))
        return [
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "I look.",
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]

    def _body(self, messages: list[dict]) -> dict:
        body = {
            "messages": list(messages),
            "max_tokens": self._rng.randrange(2, self._max_tokens),
            "temperature": self._rng.choice((0, 1)),
            "seed": self._rng.randrange(1000),
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        if any(message["role"] == "tool" for message in messages):
            body["tools"] = [{"type": "function", "function": TOOL}]
        return body

    def _keep(self, body: dict, choices: list) -> None:
        text = choices[0]["message"]["content"] or "."
        if len(body["messages"]) < 14:
            self._talks.append([*body["messages"], {"role": "assistant", "content": text}])

    async def _ask(self, client: Any, body: dict | None) -> list:
        assert body is not None
        response = await client.post(PATH, json=body, timeout=300)
        assert response.status_code == 200, response.text
        reply = response.json()
        self._asked = body
        self._log.whole.append((json.loads(json.dumps(body)), reply["choices"]))
        self._log.prompt += reply["usage"]["prompt_tokens"]
        self._log.cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return reply["choices"]

    async def _interrupt(self, app: Any, body: dict) -> str:
        """Leave a long stream in its middle; the text that came before."""
        body = {**body, "stream": True, "max_tokens": 1200, "temperature": 2, "logprobs": False}
        del body["top_logprobs"]
        client = RawClient(app, PATH, body)
        task = asyncio.create_task(client.run())
        least = self._rng.randrange(1, 5)
        await client.until(
            lambda c: c.text.count(DELTA) > least or "[DONE]" in c.text, timeout_s=200
        )
        await client.disconnect()
        await task
        text = "".join(
            choice["delta"].get("content") or ""
            for line in client.text.split("\n\n")
            if line.startswith("data: {")
            for choice in json.loads(line[6:])["choices"]
        )
        self._log.kinds["left in mid-stream"] += "[DONE]" not in client.text
        self._log.parts.append((json.loads(json.dumps(body)), text))
        return text


@contextmanager
def serving(model: ModelOptions, **topics: Any):
    with load_engine(Settings(model=model, **topics)) as engine:
        yield app_of(engine)


def talk(model: ModelOptions, folder: Path, *, users: int, phases: int, turns: int, seed: int,
         ram_bytes: int, drafting: DraftingOptions, max_tokens: int) -> Log:  # fmt: skip
    """Play all phases; what was said in them."""
    log = Log()
    players = [User(number, seed, log, max_tokens) for number in range(users)]
    cache = CacheOptions(cache_ram_bytes=ram_bytes, cache_disk=str(folder))

    async def phase(app: Any) -> None:
        await asyncio.gather(*(player.play(app, turns) for player in players))

    for number in range(phases):
        options = EngineOptions(sessions=3, max_pending=64, prefill_chunk=64)
        with serving(model, engine=options, cache=cache, drafting=drafting) as app:
            asyncio.run(phase(app))
        log.kinds["restart"] += number > 0
    return log


def differences(log: Log, model: ModelOptions) -> list[str]:
    """Replies that a server without a cache, asked one by one, does not give."""
    found = []
    with serving(model, cache=CacheOptions(cache="off")) as app:
        for body, choices in log.whole:
            reply = request(app, "POST", PATH, body=body).json()
            if without_ids(reply["choices"]) != without_ids(choices):
                found.append(f"another reply to {json.dumps(body)[:400]}")
        for body, text in log.parts:
            # more tokens than that text has: most are a byte or more, control tokens are nothing
            short = {**body, "stream": False, "max_tokens": 4 * len(text.encode()) + 64}
            reply = request(app, "POST", PATH, body=short).json()
            whole = reply["choices"][0]["message"]["content"] or ""
            if not whole.startswith(text.rstrip("\ufffd")):
                found.append(
                    f"an interrupted reply began {text!r}, not {whole!r}: {json.dumps(body)}"
                )
    return found


def without_ids(choices: list) -> list:
    """Choices without the ids of their calls, which are new each time."""
    bare = json.loads(json.dumps(choices))
    for choice in bare:
        for call in choice["message"].get("tool_calls") or []:
            del call["id"]
    return bare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--phases", type=int, default=6)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ram-mb", type=int, default=64)
    parser.add_argument("--model", default=None, help="by default the embedded model")
    parser.add_argument("--speculative", default="off", choices=("off", "mtp"))
    a = parser.parse_args()
    model = ModelOptions(model=a.model, threads=1, context=4096)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = talk(
            model, Path(folder), users=a.users, phases=a.phases, turns=a.turns, seed=a.seed,
            ram_bytes=a.ram_mb << 20, drafting=DraftingOptions(speculative=a.speculative),
            max_tokens=24,
        )  # fmt: skip
    found = differences(log, model)
    print("\n".join(found))  # noqa: T201
    print(  # noqa: T201
        f"{len(log.whole)} replies and {len(log.parts)} interrupted ones, {len(found)} unlike a"
        f" cold server's; {log.cached} of {log.prompt} prompt tokens reused;"
        f" {dict(sorted(log.kinds.items()))}; {time.monotonic() - began_s:.0f} s"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
