"""What "one answer" costs on a GPU: decoding and prefill against variants that give it up.

    python benchmarks/gpu_one_answer.py [--mix q4_k_xl] [--layers 48] [--depth 2048]
        [--users 1,8] [--repeats 5] [--save FILE]

A reply's numbers may not depend on what else is in a launch. Each variant drops one thing that this asks
for, and keeps the rest:

recurrent   a row of its own moves the delta state on by itself and reads it, in place of entering its
            chunk of 64 rows again. (It could not be taken back either, so drafts would need copies.)
tiles of 8  up to 8 rows go through the matrix instructions for 8 rows, whose rounding is another.
parts N     products of few rows are cut for N programs, whatever many rows do.
whole       no product of many rows is cut into parts.

Times are medians of `--repeats` turns, ours and a variant by turns, on one card; the ratio is ours over
the variant's. Answers of the variants are other numbers, so only times are looked at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from gpu_ahead import compile_ahead
from gpu_model import build, decode_s, deep, prefill_s

from civetta.kernels.fused import delta, streams
from civetta.kernels.fused.launch import FIRST_ROW, ROWS, STATE
from civetta.kernels.matmul import dense, tiling
from civetta.kernels.matmul import triton as products

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from civetta.kernels.fused.delta import DeltaPlaces, DeltaSizes
    from civetta.kernels.fused.launch import Batch
    from civetta.model.gpu.trunk import GpuTrunk

STATE_COLS = 32


@triton.jit(do_not_specialize=["B"])
def step_kernel(
    mixed, log_decay, beta, o, sessions, B, S_AT, H: tl.constexpr, V: tl.constexpr,
    A: tl.constexpr, BA: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """One row of a session through BA columns of one head's state, which moves on (model.md E.2)."""
    C: tl.constexpr = (2 * H + V) * A
    i_b, i_v, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_v % H if TILED else i_v // (V // H)
    a, part = tl.arange(0, A), i_b * BA + tl.arange(0, BA)
    state = tl.load(sessions + STATE * B + b) + S_AT
    p_state = state.to(tl.pointer_type(tl.float32)) + (i_v * A + a)[:, None] * A + part[None, :]
    b_state = tl.load(p_state)
    t = tl.load(sessions + FIRST_ROW * B + b)
    for i in range(tl.load(sessions + ROWS * B + b)):
        row = (t + i) * C
        k = tl.load(mixed + row + (H + i_h) * A + a).to(tl.float32)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        q = tl.load(mixed + row + i_h * A + a).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (A**-0.5)
        v = tl.load(mixed + row + (2 * H + i_v) * A + part).to(tl.float32)
        b_state *= tl.exp(tl.load(log_decay + (t + i) * V + i_v))
        told = tl.sum(b_state * k[:, None], axis=0)
        b_state += k[:, None] * ((v - told) * tl.load(beta + (t + i) * V + i_v))[None, :]
        y = tl.sum(b_state * q[:, None], axis=0)
        tl.store(o + ((t + i) * V + i_v) * A + part, y.to(o.dtype.element_ty))
    tl.store(p_state, b_state)


def stepped(
    batch: Batch,
    sizes: DeltaSizes,
    at: DeltaPlaces,
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """As delta._walked, row by row; see `step_kernel`."""
    v, a = sizes.value_heads, sizes.width
    o = torch.empty((batch.rows, v, a), dtype=mixed.dtype, device=mixed.device)
    cols = min(STATE_COLS, a)
    step_kernel[(a // cols, v, batch.sessions)](
        mixed, log_decay, beta, o, batch.sessions_FB, batch.sessions, at.state,
        H=sizes.key_heads, V=v, A=a, BA=cols, TILED=sizes.tiled, num_warps=4,
    )  # fmt: skip
    return o


@contextmanager
def recurrent() -> Iterator[None]:
    with patch.object(delta, "_walked", stepped):
        yield


@contextmanager
def tiles_of_8() -> Iterator[None]:
    real = tiling.tile_rows_for

    def rows_for(rows: int) -> int:
        return 8 if rows <= 8 else real(rows)

    with (
        patch.object(products, "tile_rows_for", rows_for),
        patch.object(streams, "tile_rows_for", rows_for),
    ):
        yield


def parts_for(programs: int) -> Callable[[], Any]:
    @contextmanager
    def variant() -> Iterator[None]:
        with patch.object(tiling, "PROGRAMS", programs):
            yield

    return variant


@contextmanager
def whole() -> Iterator[None]:
    with (
        patch.object(products, "part_cols", lambda w: w.cols),
        patch.object(dense, "part_cols", lambda w: w.cols),
    ):
        yield


@contextmanager
def both(*variants: Callable[[], Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for variant in variants:
            stack.enter_context(variant())
        yield


DECODING: dict[str, Callable[[], Any]] = {
    "recurrent": recurrent,
    "tiles of 8": tiles_of_8,
    "parts 128": parts_for(128),
    "parts 512": parts_for(512),
    "recurrent, tiles of 8": lambda: both(recurrent, tiles_of_8),
}
PREFILL: dict[str, Callable[[], Any]] = {"whole": whole}


def turns(
    trunk: GpuTrunk, once: Callable[[], float], variant: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    """Seconds of ours and of the variant by turns, and the ratio of their medians."""
    found: dict[str, list[float]] = {"ours": [], "variant": []}
    with variant(), trunk.without_graphs():
        compile_ahead(once)
    for _ in range(repeats):
        for name, times in found.items():
            with both(*([variant] if name == "variant" else [])):
                trunk.forget_graphs()
                once()  # the first launch of a size is not captured
                once()
                times.append(once())
    ours, other = (statistics.median(times) for times in found.values())
    return {**found, "ours_over_variant": ours / other}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mix", default="q4_k_xl")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--ngram-base", type=int, default=250_000)
    parser.add_argument("--placement", default="ram")
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("--users", default="1,8")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"args": {k: str(v) for k, v in vars(args).items()}}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        trunk = build(args, Path(folder))
        results["recurrent's distance"] = apart = distance(trunk)
        print(f"first tokens' logits, ours and recurrent: {apart:.3g} apart", flush=True)
        cases: dict[str, tuple[Callable[[], float], dict[str, Callable[[], Any]]]] = {}
        for users in (int(n) for n in args.users.split(",")):
            store = trunk.store(sessions=users, context_tokens=args.depth + 8192)
            sessions = [deep(store, args.depth) for _ in range(users)]
            cases[f"decode c={users}"] = (
                lambda s=sessions: decode_s(trunk, s, args.steps),  # type: ignore[misc]
                DECODING,
            )
        cases[f"prefill {args.chunk}"] = (lambda: one_chunk(trunk, args.chunk), PREFILL)
        for case, (once, variants) in cases.items():
            with trunk.without_graphs():
                compile_ahead(once)
            for name, variant in variants.items():
                found = turns(trunk, once, variant, args.repeats)
                results[f"{case}, {name}"] = found
                print(
                    f"{case}, {name}: ours takes {found['ours_over_variant']:.3f} of it", flush=True
                )
        trunk.close()
    print(json.dumps(results, indent=1))
    if args.save:
        args.save.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def distance(trunk: GpuTrunk, tokens: int = 5) -> float:
    """Relative L2 between logits of a text's first tokens, one by one, of ours and of `recurrent`."""
    found = []
    for around in (nullcontext, recurrent):
        store = trunk.store(sessions=1, context_tokens=4096)
        session = store.open()
        with around(), trunk.without_graphs():
            rows = [trunk.forward(session, [1000 + i], "last") for i in range(tokens)]
        found.append(torch.stack(rows))
        session.close()
    return float((found[1] - found[0]).norm() / found[0].norm())


def one_chunk(trunk: GpuTrunk, tokens: int) -> float:
    store = trunk.store(sessions=1, context_tokens=tokens + 64)
    session = store.open()
    took = prefill_s(trunk, session, tokens)
    session.close()
    return took


if __name__ == "__main__":
    sys.exit(main())
