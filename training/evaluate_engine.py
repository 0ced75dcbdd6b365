"""The figures of docs/nano.md: held-out abilities through the engine at temperature 0.

python -m training.evaluate_engine [--quick] [--only tools,copy] [-m MODEL] [--device cuda]

Every line of the output is one task as JSON: right answers of how many asked. Greedy decoding
repeats, so two runs on one machine print the same figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from civetta.chat.images import cut_patches
from civetta.chat.placeholders import expand
from civetta.engine.load import load_engine
from civetta.engine.protocol import Finished, GenerateRequest, RequestImage, TokenEvent
from civetta.model.bind_mtp import find_head
from civetta.model.build import build_trunk, check_checkpoint
from civetta.model.embedded import embedded_model_path
from civetta.options import EngineOptions, ModelOptions, Settings
from civetta.types import SamplingParams
from training.data.encode import encode_text, marks
from training.data.graders import parse_reply
from training.data.heldout import EvalItem, heldout, heldout_text
from training.trainer.evaluate_images import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from civetta.chat.image_rules import ImageRules
    from civetta.engine.engine import Engine
    from civetta.model.trunk import Trunk

SEED = 7
"""Held-out items that no run looked at while training."""

DRAFTS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One line of figures; `tools` keeps items with that many tools declared."""

    name: str
    ability: str
    count: int
    quick: int
    thinking: bool = False
    tokens: int | None = None
    tools: int | None = None


TASKS = (
    Task(name="arithmetic", ability="arithmetic", count=200, quick=20),
    Task(name="arithmetic, thinking", ability="arithmetic", count=200, quick=10, thinking=True),
    Task(name="json", ability="json", count=200, quick=10),
    Task(name="copy of 40 tokens", ability="copy", count=200, quick=10),
    Task(name="definitions", ability="definitions", count=200, quick=10),
    Task(name="definitions, thinking", ability="definitions", count=200, quick=5, thinking=True),
    Task(name="tools, few declared", ability="tools", count=200, quick=10, tokens=800),
    Task(name="tools, 8 declared", ability="tools", count=200, quick=5, tools=8),
    Task(name="retrieval at 1k", ability="retrieval", count=200, quick=5, tokens=1024),
    Task(name="retrieval at 4k", ability="retrieval", count=200, quick=2, tokens=4096),
    Task(name="retrieval at 12k", ability="retrieval", count=100, quick=1, tokens=12000),
)
STORIES = Task(name="stories", ability="stories", count=60, quick=4)


def main() -> None:
    """Run the tasks one after the other."""
    a = _arguments()
    path = a.model or str(embedded_model_path())
    settings = Settings(
        model=ModelOptions(model=path, threads=a.threads, device=a.device, dtype="f32"),
        engine=EngineOptions(sessions=a.sessions),
    )
    wanted = a.only.split(",") if a.only else []

    def asked(name: str) -> bool:
        return not wanted or any(name.startswith(word) for word in wanted)

    with load_engine(settings) as engine:
        for task in (*TASKS, STORIES):
            if asked(task.name):
                count = task.quick if a.quick else task.count
                _say(run_task(engine, task, min(count, a.most or count), a.sessions))
        if asked("drafts"):
            for ability in ("stories", "definitions"):
                items = heldout(ability, 4 if a.quick else 40, seed=SEED)
                replies = [answer(engine, item)[1] for item in items]
                _say(drafts(path, ability, items, replies))
        if asked("pictures"):
            count = 100 if a.quick else 1200
            for line in pictures(engine, min(count, a.most or count), a.sessions):
                _say(line)
    if asked("perplexity"):
        _say(perplexity(path, 8 if a.quick else 200))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="the embedded model unless given")
    parser.add_argument("--quick", action="store_true", help="a few items of each, minutes")
    parser.add_argument("--only", help="beginnings of names of tasks, separated by commas")
    parser.add_argument("--most", type=int, help="ask at most that many items a task")
    parser.add_argument("--device", default="cpu", help="cuda asks the same in float32 on a GPU")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=4)
    return parser.parse_args()


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def items_of(task: Task, count: int) -> list[EvalItem]:
    """The task's items."""
    if task.tools is None:
        return heldout(task.ability, count, seed=SEED, thinking=task.thinking, tokens=task.tokens)
    drawn = heldout(task.ability, 2 * count + 20, seed=SEED, thinking=task.thinking)
    return [item for item in drawn if len(item.tools or ()) == task.tools][:count]


def run_task(engine: Engine, task: Task, count: int, sessions: int) -> dict[str, Any]:
    """Right answers; with thinking on, a reply without a filled thinking block is wrong."""
    began = time.monotonic()
    items = items_of(task, count)
    with ThreadPoolExecutor(sessions) as pool:
        texts = [text for text, _ in pool.map(lambda item: answer(engine, item), items)]
    right = sum(_is_right(item, text) for item, text in zip(items, texts, strict=True))
    line = {"task": task.name, "right": right, "of": len(items)}
    wrong = [t for i, t in zip(items, texts, strict=True) if not _is_right(i, t)]
    if wrong:
        line["first_wrong"] = wrong[0][:200]
    return line | {"seconds": round(time.monotonic() - began, 1)}


def _is_right(item: EvalItem, text: str) -> bool:
    if not item.enable_thinking:
        return "<think>" not in text and item.grade_text(text)
    return bool(parse_reply(text, thinking=True).reasoning) and item.grade_text(text)


def answer(engine: Engine, item: EvalItem) -> tuple[str, list[int]]:
    """A greedy reply: its text with special tokens, and its token ids."""
    return _generated(engine, text_request(item))


def text_request(item: EvalItem) -> GenerateRequest:
    """The request of a prompt, without its pictures."""
    return GenerateRequest(
        request_id=f"{item.ability}-{item.index}",
        prompt_ids=tuple(encode_text(item.prompt)),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=item.max_tokens,
    )


def picture_request(item: EvalItem, rules: ImageRules, token_id: int) -> GenerateRequest:
    """The request of a prompt with its pictures laid in, prepared as the server prepares them."""
    request = text_request(item)
    made = [cut_patches([Image.fromarray(pixels)], rules) for pixels in item.images]
    runs = [(token_id, image.tokens) for image in made]
    ids, starts = expand(request.prompt_ids, runs, (token_id,))
    placed = zip(starts, made, strict=True)
    images = tuple(RequestImage(position=start, image=image) for start, image in placed)
    return replace(request, prompt_ids=ids, images=images)


def _generated(engine: Engine, request: GenerateRequest) -> tuple[str, list[int]]:
    events = list(engine.submit(request))
    text = "".join(e.text for e in events if isinstance(e, TokenEvent | Finished))
    return text, [e.token_id for e in events if isinstance(e, TokenEvent)]


def drafts(
    path: str, ability: str, items: list[EvalItem], replies: list[list[int]]
) -> dict[str, Any]:
    """Shares of drafts accepted at each depth, given that those before them were.

    The engine's own head drafts from every token of the model's greedy replies.
    """
    checked = check_checkpoint(path)
    head = find_head(checked.checkpoint, checked.config, None)
    assert head is not None, "the model has a draft head"
    trunk = build_trunk(checked, dtype=torch.float32, ops=_ops(), head=head)
    hits, tried = np.zeros(DRAFTS, int), np.zeros(DRAFTS, int)
    for item, reply in zip(items, replies, strict=True):
        for reached, ended in _chains(trunk, encode_text(item.prompt), reply):
            hits[:reached] += 1
            tried[: min(DRAFTS, reached + ended)] += 1
    shares = [round(float(h / max(1, n)), 4) for h, n in zip(hits, tried, strict=True)]
    return {"task": f"drafts in {ability}", "accepted": shares, "drafts": tried.tolist()}


def _chains(trunk: Trunk, prompt: list[int], reply: list[int]) -> Iterator[tuple[int, bool]]:
    """For a chain at each token: drafts accepted, and whether a wrong draft ended it."""
    assert trunk.head is not None
    session = trunk.store(sessions=1, context_tokens=len(prompt) + len(reply) + 64).open()
    trunk.forward(session, prompt, "none")
    for place, token in enumerate(reply[:-1]):
        session.reserve(1 + DRAFTS)
        logits, chain = trunk.head.begin([session], [token])
        reached, wrong = 0, False
        for wanted in reply[place + 1 : place + 1 + DRAFTS]:
            guess = int(logits[0].argmax())
            wrong = guess != wanted
            if wrong:
                break
            reached += 1
            if reached < DRAFTS:
                logits, chain = trunk.head.extend(chain, [guess])
        session.trim()
        yield reached, wrong
        trunk.forward(session, [token], "none")


def _ops():  # type: ignore[no-untyped-def]  # the kernels' table, named where it is made
    from civetta.kernels.select import select

    return select("cpu", torch.get_num_threads())


def perplexity(path: str, count: int) -> dict[str, Any]:
    """exp of the mean loss a token on held-out stories."""
    trunk = build_trunk(check_checkpoint(path), dtype=torch.float32, ops=_ops())
    total, tokens = 0.0, 0
    for text in heldout_text(count, seed=SEED):
        ids = [*encode_text(text), marks().end_of_text]
        session = trunk.store(sessions=1, context_tokens=len(ids) + 64).open()
        logits = trunk.forward(session, ids[:-1], "all")
        wanted = torch.tensor(ids[1:])
        total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        tokens += len(wanted)
    return {"task": "story perplexity", "value": round(float(np.exp(total / tokens)), 4),
            "stories": count, "tokens": tokens}  # fmt: skip


def pictures(engine: Engine, count: int, sessions: int) -> Iterator[dict[str, Any]]:
    """A line a kind of question and size of picture; an answer is right when it is exact."""
    found = engine.info.images
    assert found is not None, "the model has a vision tower"
    items = heldout("vision", count, seed=SEED)
    requests = [picture_request(item, found.rules, found.token_id) for item in items]
    with ThreadPoolExecutor(sessions) as pool:
        texts = [
            text for text, _ in pool.map(lambda request: _generated(engine, request), requests)
        ]
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for item, text in zip(items, texts, strict=True):
        asked[kind_of(item)] += 1
        right[kind_of(item)] += text.strip() == str(item.expected)
    for kind in sorted(asked):
        yield {"task": f"pictures, {kind}", "right": right[kind], "of": asked[kind]}


if __name__ == "__main__":
    main()
