"""What prefill costs on the CPU: by batch size, behind the last mixer, and under timing of phases.

    python benchmarks/prefill.py [--threads 1] [--tokens 8192] [--rounds 3] [--only batch] [--save F]

Settings run in turn (A B C A B C ...); figures are medians. CPU seconds are the process's own, summed
over its threads, and hold beside other work; wall seconds do only on an idle machine. Two models:
civetta-nano, and a random one of greater width that is written to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from civetta.bench.case import token_stream
from civetta.bench.phases import PhaseTimer, timed_trunk
from civetta.kernels.select import select
from civetta.model.build import load_trunk
from civetta.model.embedded import embedded_model_path
from civetta.model.tiny import (
    tiny_config,
    tiny_tensors,
    to_bf16,
    write_json,
    write_safetensors,
    write_tokenizer,
)
from civetta.model.trunk import Trunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from civetta.model.inputs import Span, Wanted
    from civetta.model.weights import BlockWeights

BATCHES = (128, 256, 512, 1024, 2048, 4096, 8192)
WIDE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "hc_lowrank": 64,
    "indexer_head_dim": 64,
    "indexer_budget": 2048,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "partial_rotary_factor": 0.25,
}


class AllRows(Trunk):
    """A trunk that computes every row of the last block, as if all were wanted."""

    def _block(
        self,
        w: BlockWeights,
        x_TSD: Tensor,
        spans: tuple[Span, ...],
        index: int,
        rope_3T: Tensor,
        needed: Wanted | None,
    ) -> Tensor:
        whole = super()._block(w, x_TSD, spans, index, rope_3T, None)
        return whole if needed is None else whole[needed.rows_N]


@dataclass(frozen=True)
class Figure:
    """Medians of one setting, and of its ratio to the first one, round by round."""

    part: str
    model: str
    setting: str
    wall_s: float
    cpu_s: float
    cpu_ratio: float
    cpu_ratio_min: float
    cpu_ratio_max: float


def prefill(trunk: Trunk, tokens: int, batch: int) -> Callable[[], Tensor]:
    ids = token_stream(0, 0, tokens, trunk.config.vocab)

    def run() -> Tensor:
        session = trunk.store(sessions=1, context_tokens=tokens).open()
        logits = torch.zeros(0)
        for first in range(0, tokens, batch):
            last = first + batch >= tokens
            logits = trunk.forward(session, ids[first : first + batch], "last" if last else "none")
        return logits

    return run


def in_turn(
    part: str, model: str, settings: dict[str, Callable[[], Tensor]], rounds: int
) -> list[Figure]:
    """Refuses to report on settings whose logits differ."""
    wall: dict[str, list[float]] = {name: [] for name in settings}
    cpu: dict[str, list[float]] = {name: [] for name in settings}
    outputs = [run() for run in settings.values()]  # the warm-up
    if not all(torch.equal(out, outputs[0]) for out in outputs):
        raise SystemExit(f"{part}, {model}: the settings compute different logits")
    for _ in range(rounds):
        for name, run in settings.items():
            wall_began, cpu_began = time.perf_counter(), time.process_time()
            run()
            cpu[name].append(time.process_time() - cpu_began)
            wall[name].append(time.perf_counter() - wall_began)
    base = next(iter(cpu.values()))
    figures = []
    for name in settings:
        ratios = [own / first for own, first in zip(cpu[name], base, strict=True)]
        figures.append(
            Figure(
                part=part,
                model=model,
                setting=name,
                wall_s=statistics.median(wall[name]),
                cpu_s=statistics.median(cpu[name]),
                cpu_ratio=statistics.median(ratios),
                cpu_ratio_min=min(ratios),
                cpu_ratio_max=max(ratios),
            )
        )
    return figures


def batches(model: str, trunk: Trunk, tokens: int, rounds: int) -> list[Figure]:
    sizes = [size for size in BATCHES if size <= tokens]
    settings = {str(size): prefill(trunk, tokens, size) for size in sizes}
    return in_turn("batch", model, settings, rounds)


def last_block(model: str, trunk: Trunk, tokens: int, rounds: int) -> list[Figure]:
    whole = AllRows(trunk.config, trunk.weights, trunk.ops, trunk.dtype, trunk._rows)
    batch = min(2048, tokens)
    settings = {
        "all rows": prefill(whole, tokens, batch),
        "wanted rows": prefill(trunk, tokens, batch),
    }
    return in_turn("last block", model, settings, rounds)


def phases(model: str, trunk: Trunk, tokens: int, rounds: int) -> list[Figure]:
    """Prefill, and decoding where an op is short and its timing weighs most."""
    timer = PhaseTimer()
    timed = timed_trunk(trunk, timer)

    def emptied(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def both() -> Tensor:
            logits = run()
            timer.take(0.0)
            return logits

        return both

    few = min(tokens, 2048)
    steps = 64
    return in_turn(
        f"phases, prefill of {few}",
        model,
        {"off": prefill(trunk, few, few), "on": emptied(prefill(timed, few, few))},
        rounds,
    ) + in_turn(
        f"phases, {steps} tokens one by one",
        model,
        {"off": prefill(trunk, steps, 1), "on": emptied(prefill(timed, steps, 1))},
        rounds,
    )


def write_wide(folder: Path) -> Path:
    config = tiny_config()
    config["text_config"].update(WIDE)
    config["text_config"]["rope_parameters"]["partial_rotary_factor"] = 0.25
    config["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 5]
    write_safetensors(
        folder / "model.safetensors",
        {
            name: ("I64", values) if values.dtype.kind == "i" else ("BF16", to_bf16(values))
            for name, values in tiny_tensors(config).items()
        },
    )
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    return folder


PARTS = {"batch": batches, "last": last_block, "phases": phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--save", type=Path, help="JSON lines to append the figures to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops = select("cpu", options.threads)
    print(f"{ops.name}, {options.threads} threads, torch {torch.__version__}", flush=True)
    print("| part | model | setting | wall s | CPU s | CPU time over the first's | range |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = {"nano": embedded_model_path(), "wide": write_wide(Path(folder))}
        for name, path in models.items():
            trunk = load_trunk(path, ops=ops)
            for part, measure in PARTS.items():
                if options.only in {None, part}:
                    report(measure(name, trunk, options.tokens, options.rounds), options.save)


def report(figures: list[Figure], save: Path | None) -> None:
    for f in figures:
        print(
            f"| {f.part} | {f.model} | {f.setting} | {f.wall_s:.3f} | {f.cpu_s:.3f} |"
            f" {f.cpu_ratio:.3f} | {f.cpu_ratio_min:.3f}-{f.cpu_ratio_max:.3f} |",
            flush=True,
        )
    if save is not None:
        with save.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(vars(f)) + "\n" for f in figures)


if __name__ == "__main__":
    main()
