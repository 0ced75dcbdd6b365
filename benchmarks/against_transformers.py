"""Prefill and decode against transformers' eager qwen4_exp on the same tiny checkpoint, A B A B.

    python benchmarks/against_transformers.py [--tokens 512] [--steps 32] [--rounds 5]
        [--threads 2] [--clock wall|cpu] [--save FILE]

With --threads 1 --clock cpu the processor time counts, which other processes on the cores hardly change.
Prints and saves the medians and the ratio (ours over theirs) of tokens a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "model"))
import transformers_oracle as oracle

from civetta.kernels.select import select
from civetta.model.build import load_trunk

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    if a.clock == "cpu" and a.threads != 1:
        parser.error("processor time is a rate with --threads 1 only")
    now = CLOCKS[a.clock]
    warnings.simplefilter("ignore")
    model = oracle.random_model(oracle.text_config(hidden_size=128, vocab_size=2048), seed=1)
    ids = torch.randint(0, 2048, (a.tokens + a.steps,))
    with tempfile.TemporaryDirectory() as folder:
        ops = select("cpu", a.threads)
        trunk = load_trunk(oracle.save(model, Path(folder)), ops=ops)
        sides = {
            "ours": lambda: ours(trunk, ids, a.tokens, now),
            "theirs": lambda: theirs(model, ids, a.tokens, a.threads, now),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(a.rounds + 1):
            for name, run in sides.items():
                times[name].append(run())
    report = {"tokens": a.tokens, "steps": a.steps, "rounds": a.rounds, "ops": ops.name}
    report |= {"threads": a.threads, "clock": a.clock}
    for i, what in enumerate(("prefill", "decode")):
        count = (a.tokens, a.steps)[i]
        rate = {n: count / statistics.median(x[i] for x in t[1:]) for n, t in times.items()}
        report[what] = {
            **{f"{n}_tokens_s": round(r, 1) for n, r in rate.items()},
            "ratio": round(rate["ours"] / rate["theirs"], 2),
        }
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n", encoding="utf-8")


def ours(trunk, ids, tokens, now):  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)  # as `select` sets it; the compiled table has threads of its own
    session = trunk.store(sessions=1, context_tokens=len(ids)).open()
    start = now()
    trunk.forward(session, ids[:tokens].tolist())
    middle = now()
    for token in ids[tokens:].tolist():
        trunk.forward(session, [token])
    return middle - start, now() - middle


def theirs(model, ids, tokens, threads, now):  # type: ignore[no-untyped-def]
    torch.set_num_threads(threads)
    with torch.no_grad():
        start = now()
        out = model(ids[None, :tokens], use_cache=True, logits_to_keep=1)
        cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
        middle = now()
        for token in ids[tokens:].tolist():
            model(torch.tensor([[token]]), cache=cache, use_cache=True)
        return middle - start, now() - middle


if __name__ == "__main__":
    main()
