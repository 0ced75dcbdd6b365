"""Drafting: is a reply the same, what do drafts cost and bring on this machine, A B A B.

    python benchmarks/drafting.py identity [-m MODEL] [--prompts 200] [--tokens 32] [--save FILE]
    python benchmarks/drafting.py speed [-m MODEL] [--mode mtp] [--users 1 2 4 8] [--save FILE]
    python benchmarks/drafting.py steps [-m MODEL] [--save FILE]

identity: token ids with drafts of 0, 1, 3 and 7 tokens and adaptive lengths equal those without, for
greedy and two kinds of sampling, alone and four and eight at a time; exit status 1 when one differs.
speed: tokens a second of decoding over those without drafts (sum over users, medians of rounds), and
how many drafts stood by depth, on prose and on text that repeats itself.
steps: a launch of 1 to 8 rows, a draft step, and the acceptance at which drafts of each length pay.

--cpu-time counts the step thread's processor time with one thread, for a machine that others use.
Without -m the embedded model; --random-head adds an untrained draft head to a Hugging Face folder
without one: the worst case, in which drafting can only lose.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from civetta.engine.calibrate import calibrate
from civetta.engine.engine import Engine
from civetta.engine.load import TrunkModel, load_trunk_only
from civetta.engine.protocol import Finished, GenerateRequest, ModelInfo, TokenEvent
from civetta.engine.speculation import Drafting
from civetta.model.embedded import embedded_model_path
from civetta.options import DraftingOptions, EngineOptions, ModelOptions, Settings
from civetta.types import SamplingParams

PROSE = [
    "Tell me a story about a fox who finds a lantern.",
    "What is a river?",
    "Explain what rain is.",
    "Tell me a story about two friends and a boat.",
    "What is a mountain?",
    "Write about a quiet village in winter.",
    "What does a baker do?",
    "Tell me a story about a lost key.",
    "Describe a garden in spring.",
    "Why do birds sing?",
    "Tell me about the moon.",
    "What is a library?",
]
REPEATS = [
    "Repeat this ten times: the red fox runs over the green hill and down to the river.",
    "Copy this text: one two three four five six one two three four five six one two three",
    "Write the list again: apple, pear, plum, apple, pear, plum, apple, pear, plum, apple",
    "Count: 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3",
]
PROMPTS = PROSE + REPEATS
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "T 0.7": SamplingParams(temperature=0.7, seed=17),
    "T 1.0, filters, penalties": SamplingParams(
        temperature=1.0,
        seed=5,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repeat_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.2,
    ),
}


class Bench:
    """Two trunks of one model, without and with its head, and engines on them."""

    def __init__(self, a: argparse.Namespace, model: str) -> None:
        self.threads, self.context = 1 if a.cpu_time else a.threads, a.context
        self.clock = time.thread_time if a.cpu_time else time.perf_counter
        torch.set_num_threads(self.threads)
        mode = getattr(a, "mode", "mtp")
        self.plain = self._load(model, "off")
        self.with_head = self._load(model, "mtp") if mode == "mtp" else self.plain
        self.costs = calibrate(self.with_head.trunk, self.clock)

    def _load(self, model: str, mode: str):  # type: ignore[no-untyped-def]
        options = ModelOptions(model=model, threads=self.threads)
        return load_trunk_only(Settings(model=options, drafting=DraftingOptions(speculative=mode)))

    def engine(self, users: int, mode: str, most: int = 7, *, fixed: bool = False) -> Engine:
        loaded = self.plain if mode == "off" else self.with_head
        drafting = None
        if mode != "off" and most:
            drafting = Drafting(
                mode="mtp" if mode == "mtp" else "lookup",
                most=most,
                head=loaded.trunk.head if mode == "mtp" else None,
                fixed=fixed,
                launches=self.costs[0],
                steps=self.costs[1] if mode == "mtp" else (),
            )
        return Engine(
            TrunkModel(
                loaded.trunk, loaded.trunk.store(sessions=users, context_tokens=self.context)
            ),
            _info(loaded, self.context),
            tokenizer=loaded.tokenizer,
            template=loaded.template,
            options=EngineOptions(sessions=users, max_pending=1000),
            clock=self.clock,
            drafting=drafting,
        )

    def requests(
        self, texts: list[str], sampling: SamplingParams, tokens: int
    ) -> list[GenerateRequest]:
        """Chat prompts with thinking off; end tokens do not end, so that lengths are alike."""
        tokenizer = self.plain.tokenizer
        assert tokenizer is not None
        form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        return [
            GenerateRequest(
                request_id=f"r{i}",
                prompt_ids=tuple(tokenizer.encode(form.format(text))),
                sampling=sampling,
                max_tokens=tokens,
                ignore_eos=True,
            )
            for i, text in enumerate(texts)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("identity", "speed", "steps"):
        command = commands.add_parser(name)
        command.add_argument("-m", "--model")
        command.add_argument("--random-head", action="store_true")
        command.add_argument("--threads", type=int, default=os.cpu_count() or 1)
        command.add_argument("--context", type=int, default=1024)
        command.add_argument("--cpu-time", action="store_true")
        command.add_argument("--save", type=Path)
        if name == "identity":
            command.add_argument("--prompts", type=int, default=200)
            command.add_argument("--tokens", type=int, default=32)
        if name == "speed":
            command.add_argument("--mode", choices=("mtp", "lookup"), default="mtp")
            command.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8])
            command.add_argument("--tokens", type=int, default=128)
            command.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or str(embedded_model_path())
        if a.random_head:
            model = str(with_random_head(Path(model), Path(folder)))
        run = {"identity": identity, "speed": speed, "steps": steps}[a.command]
        report = {"command": a.command, **run(Bench(a, model), a)}
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n", encoding="utf-8")
    if report.get("different"):
        sys.exit(1)


# ---- identity ---------------------------------------------------------------------------------------


def identity(bench: Bench, a: argparse.Namespace) -> dict[str, Any]:
    texts = [f"{PROMPTS[i % len(PROMPTS)]} ({i})" for i in range(a.prompts)]
    different, compared = [], 0
    for name, sampling in SAMPLINGS.items():
        requests = bench.requests(texts, sampling, a.tokens)
        wanted = None
        for users in (1, 4, 8):
            sides = [("off", 0), ("mtp", 1), ("mtp", 3), ("mtp", 7), ("lookup", 7), ("mtp", -7)]
            for mode, depth in sides:
                with bench.engine(users, mode, abs(depth), fixed=depth > 0) as engine:
                    found = [ids for ids, _ in run_all(engine, requests)]
                if wanted is None:
                    wanted = found
                wrong = [i for i, (x, y) in enumerate(zip(found, wanted, strict=True)) if x != y]
                compared += len(found)
                different += [f"{name}, {users} users, {mode} {depth}: prompt {i}" for i in wrong]
                print(
                    f"{name}, {users} users, {mode} {depth}: {len(wrong)} differ", file=sys.stderr
                )
    return {"prompts": a.prompts, "tokens": a.tokens, "compared": compared, "different": different}


def run_all(engine: Engine, requests: list[GenerateRequest]) -> list[tuple[list[int], Finished]]:
    """Token ids and end of each request, all queued at once."""
    out = []
    for stream in [engine.submit(request) for request in requests]:
        events = list(stream)
        assert isinstance(events[-1], Finished)
        out.append(([e.token_id for e in events if isinstance(e, TokenEvent)], events[-1]))
    return out


# ---- speed ------------------------------------------------------------------------------------------


def speed(bench: Bench, a: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"mode": a.mode, "tokens": a.tokens, "rounds": a.rounds}
    for kind, texts in (("prose", PROSE), ("repetitive", REPEATS)):
        for users in a.users:
            chosen = [texts[i % len(texts)] for i in range(max(users, 4))]
            requests = bench.requests(chosen, SAMPLINGS["greedy"], a.tokens)
            rates: dict[str, list[float]] = {"off": [], a.mode: []}
            depths = np.zeros((7, 2), int)
            with bench.engine(users, "off") as off, bench.engine(users, a.mode) as on:
                answers = []
                for _ in range(a.rounds + 1):  # the first one warms up and is where lengths settle
                    for name, engine in (("off", off), (a.mode, on)):
                        before = engine.stats()
                        answers.append([ids for ids, _ in run_all(engine, requests)])
                        after = engine.stats()
                        seconds = after.decode_s_total - before.decode_s_total
                        rates[name].append(a.tokens * len(requests) / seconds)
                depths += np.array(on.stats().draft_depths)
            assert all(one == answers[0] for one in answers), "drafting changed a reply"
            ratios = [y / x for x, y in zip(rates["off"][1:], rates[a.mode][1:], strict=True)]
            report[f"{kind}, {users} users"] = {
                "off_tokens_s": round(statistics.median(rates["off"][1:]), 1),
                "drafting_tokens_s": round(statistics.median(rates[a.mode][1:]), 1),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(x, 3) for x in ratios],
                "drafted_by_depth": depths[:, 0].tolist(),
                "accepted_by_depth": depths[:, 1].tolist(),
            }
            print(kind, users, report[f"{kind}, {users} users"], file=sys.stderr)
    return report


# ---- steps ------------------------------------------------------------------------------------------


def steps(bench: Bench, a: argparse.Namespace) -> dict[str, Any]:
    """Medians of several calibrations with a finer grid."""
    del a
    trunk = bench.with_head.trunk
    store = trunk.store(sessions=1, context_tokens=256)
    session = store.open()
    trunk.forward(session, list(range(1, 101)), "none")
    launch_s = {
        rows: _median(lambda rows=rows: _launch(bench, session, rows)) for rows in range(1, 9)
    }
    step_s = {n: _median(lambda n=n: _draft(bench, session, n)) for n in range(1, 8)}
    break_even = {}
    for n in range(1, 8):
        need = (launch_s[1 + n] + step_s[n]) / launch_s[
            1
        ]  # tokens a round that drafting has to bring
        break_even[n] = _acceptance(need - 1, n)
    return {
        "launch_ms": {n: round(s * 1e3, 3) for n, s in launch_s.items()},
        "draft_ms": {n: round(s * 1e3, 3) for n, s in step_s.items()},
        "break_even_acceptance": break_even,
    }


def _acceptance(tokens: float, n: int) -> float | None:
    """p with p + p^2 + ... + p^n = tokens; None when even p = 1 does not reach it."""
    grid = np.linspace(0, 1, 1001)
    total = sum(grid**k for k in range(1, n + 1))
    enough = np.flatnonzero(total >= tokens)
    return round(float(grid[enough[0]]), 3) if len(enough) else None


def _median(once: Any, repeats: int = 15) -> float:
    once()
    return statistics.median(once() for _ in range(repeats))


def _launch(bench: Bench, session: Any, rows: int) -> float:
    began_s = bench.clock()
    bench.with_head.trunk.forward(session, range(1, rows + 1), "all")
    seconds = bench.clock() - began_s
    session.rewind(rows)
    return seconds


def _draft(bench: Bench, session: Any, n: int) -> float:
    head = bench.with_head.trunk.head
    session.reserve(1 + n)
    began_s = bench.clock()
    _, chain = head.begin([session], [1])
    for _ in range(n - 1):
        _, chain = head.extend(chain, [1])
    seconds = bench.clock() - began_s
    session.trim()
    return seconds


# ---- models -----------------------------------------------------------------------------------------


def with_random_head(model: Path, folder: Path) -> Path:
    """The folder's files, and a second safetensors file with random `mtp.` tensors."""
    from civetta.model.tiny import tiny_tensors, to_bf16, write_safetensors

    config = json.loads((model / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    for file in model.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file.resolve())
    (folder / "model-00001-of-00002.safetensors").symlink_to(
        (model / "model.safetensors").resolve()
    )
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: v for n, v in tiny_tensors(config).items() if n.startswith("mtp.")}
    name = "model-00002-of-00002.safetensors"
    write_safetensors(folder / name, {n: ("BF16", to_bf16(v)) for n, v in tensors.items()})
    from civetta.checkpoint.safetensors import read_safetensors_folder

    held = read_safetensors_folder(model).tensors
    index = dict.fromkeys(held, "model-00001-of-00002.safetensors") | dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def _info(loaded: Any, context: int) -> ModelInfo:
    return ModelInfo(
        model_id="bench",
        path=str(loaded.path),
        context_tokens=context,
        vocab_size=loaded.trunk.config.vocab,
        parameters=0,
        format="",
        device="cpu",
        dtype="f32",
        created_s=0,
        has_tokenizer=loaded.tokenizer is not None,
    )


if __name__ == "__main__":
    main()
