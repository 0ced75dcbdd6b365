"""Speed of the whole model at real sizes on a GPU, with random weights.

    python benchmarks/gpu_model.py [--mix q4_k_xl] [--layers 48] [--ngram-base 250000]
        [--placement ram] [--cases decode,company,verify,prefill,sampling,memory]
        [--depths 0,131072] [--save FILE]

Depth is reached by filling the pages with random keys, which costs no prefill; timings do not depend
on what the keys are. Medians of `--repeats`; a decoded token's id is read by the host each step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_ahead import compile_ahead

from civetta.decode.history import TokenHistory
from civetta.decode.sampler import SampleRow
from civetta.decode.shortlist import Asked, sample
from civetta.engine.logit_rows import host_rows, listed_rows
from civetta.kernels.gpu import gpu_ops
from civetta.model.gpu.random import (
    flash_next_config,
    random_weights,
    weight_bytes,
    write_random_table,
)
from civetta.model.gpu.trunk import GpuTrunk
from civetta.model.inputs import Piece
from civetta.ngram.feed import RowFeed
from civetta.ngram.placement import StoreOptions, open_store
from civetta.types import SamplingParams

if TYPE_CHECKING:
    from civetta.state.session import Session, SessionStore

PAGE = 64


def build(args: argparse.Namespace, folder: Path) -> GpuTrunk:
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    config = flash_next_config(args.layers, args.ngram_base)
    layout = write_random_table(config, args.mix, folder / "table")
    began = time.perf_counter()
    weights = random_weights(config, args.mix, device)
    torch.cuda.synchronize()
    size = weight_bytes(weights)
    print(f"weights {size / 1e9:.1f} GB made in {time.perf_counter() - began:.1f} s", flush=True)
    options = StoreOptions(placement=args.placement)
    store = open_store(layout, options, device=device, other_bytes=0)
    assert config.ple is not None
    feed = RowFeed(config.ple.hash, store, dtype=dtype, device=device)
    return GpuTrunk(config, None, weights, gpu_ops(), dtype, feed, device=device)


def deep(store: SessionStore, depth: int) -> Session:
    """A session that holds `depth` tokens of random keys."""
    session = store.open()
    if depth:
        session.reserve(depth)
        fill(store)  # pages are zeroed when they are taken
        rope = session.rope_room(depth)
        rope[:, :depth] = torch.arange(depth, device=rope.device)
        session.extend([i % 1000 for i in range(depth)], None)
        session.recurrent.base = session.recurrent.base_after(depth)
    return session


def fill(store: SessionStore) -> None:
    for layer in store.pool.layers:
        for part in (layer.k, layer.v, layer.index_raw, layer.index_key):
            part.normal_()


def decode_s(trunk: GpuTrunk, sessions: list[Session], steps: int, rows: int = 1) -> float:
    """Seconds of a step: `rows` tokens of each session, newest ids read by the host."""
    ids = [[7 + i] * rows for i in range(len(sessions))]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        logits = trunk.forward_pieces(
            [Piece(session=s, ids=i, rows="all") for s, i in zip(sessions, ids, strict=True)]
        )
        best = logits.argmax(-1).view(len(sessions), rows).tolist()
        ids = [[b[-1]] * rows for b in best]
        for session, own in zip(sessions, ids, strict=True):
            trunk.expect(session, own)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def prefill_s(trunk: GpuTrunk, session: Session, tokens: int) -> float:
    ids = [(i * 7919) % 248000 for i in range(tokens)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    trunk.forward(session, ids, "last").argmax(-1).tolist()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", default="q4_k_xl")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--ngram-base", type=int, default=250_000)
    parser.add_argument("--placement", default="ram")
    parser.add_argument("--cases", default="decode,company,verify,prefill")
    parser.add_argument("--depths", default="0,131072")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()
    results: dict[str, Any] = {"args": vars(args), "gpu": torch.cuda.get_device_name()}
    depths = [int(d) for d in args.depths.split(",")]
    cases = args.cases.split(",")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        trunk = build(args, Path(folder))
        weights = torch.cuda.memory_allocated()
        began = time.perf_counter()

        def once() -> None:
            store = trunk.store(sessions=2, context_tokens=max(depths) + 2 * args.chunk + 4096)
            small = [1, 8] if "verify" in cases or "company" in cases else [1]
            sizes = [*small, args.chunk] if "prefill" in cases else small
            for depth in {0, max(depths)}:
                for rows in sizes:
                    session = deep(store, depth)
                    trunk.forward(session, [1] * rows, "all" if rows <= 8 else "last")
                    session.close()

        n = compile_ahead(once)
        print(f"{n} launches compiled in {time.perf_counter() - began:.1f} s", flush=True)
        for depth in depths:
            run_depth(trunk, depth, cases, args, results)
        if "sampling" in cases:
            sampling(trunk, results, args.repeats)
        if "memory" in cases:
            memory(trunk, weights, results)
        trunk.close()
    results["memory_peak_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(results, indent=1))
    if args.save:
        Path(args.save).write_text(json.dumps(results, indent=1) + "\n")


def run_depth(
    trunk: GpuTrunk, depth: int, cases: list[str], args: argparse.Namespace, results: dict[str, Any]
) -> None:
    room = (args.repeats + 3) * max(args.steps * 8, args.chunk if "prefill" in cases else 0)
    store = trunk.store(sessions=1, context_tokens=min(depth + room + 4096, 262144))
    key = f"depth {depth}"
    if "decode" in cases:
        session = deep(store, depth)
        decode_s(trunk, [session], 4)
        times = [decode_s(trunk, [session], args.steps) for _ in range(args.repeats)]
        report(results, f"decode c=1 {key}", times, 1)
        if args.profile:
            profile(lambda: decode_s(trunk, [session], 2))
        session.close()
    if "verify" in cases:
        session = deep(store, depth)
        decode_s(trunk, [session], 4, 8)
        times = [decode_s(trunk, [session], args.steps, 8) for _ in range(args.repeats)]
        report(results, f"verify 8 rows {key}", times, 8)
        session.close()
    if "prefill" in cases:
        times = []
        for _ in range(args.repeats + 1):
            session = deep(store, depth)
            times.append(prefill_s(trunk, session, args.chunk))
            session.close()
        report(results, f"prefill {args.chunk} {key}", times[1:], args.chunk)
        if args.profile:
            session = deep(store, depth)
            profile(lambda: prefill_s(trunk, session, args.chunk))
            session.close()
    del store
    if "company" in cases and depth <= 4096:
        store = trunk.store(sessions=8, context_tokens=2048 + 4096)
        sessions = [deep(store, 2048) for _ in range(8)]
        decode_s(trunk, sessions, 4)
        times = [decode_s(trunk, sessions, args.steps) for _ in range(args.repeats)]
        report(results, "decode c=8 depth 2048", times, 8)


def memory(trunk: GpuTrunk, weights: int, results: dict[str, Any]) -> None:
    """Most bytes beside the weights with one session of the whole context, by rows of a chunk.

    `held` is what stays between chunks: pages, state, tables; `planned` what the memory plan counts for
    a chunk's launch. The last case: sessions and captured launches of the others are given back first.
    """
    full = trunk.config.context_tokens
    trunk.forget_graphs()
    for chunk in (1, 2048, 4096):
        gc.collect()
        torch.cuda.empty_cache()
        store = trunk.store(sessions=1, context_tokens=full)
        session = deep(store, full - chunk)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() - weights
        prefill_s(trunk, session, chunk)
        found = {
            "held": held,
            "peak": torch.cuda.max_memory_allocated() - weights,
            "reserved": torch.cuda.max_memory_reserved() - weights,
            "planned": trunk.launch_bytes(chunk, full),
        }
        results[f"memory at {full}, chunk {chunk}"] = found
        print(f"memory at {full}, chunk {chunk}: {found}", flush=True)
        session.close()
        trunk.forget_graphs()
        del store, session


def sampling(trunk: GpuTrunk, results: dict[str, Any], repeats: int) -> None:
    """Rows of logits to the host: as shortlists, and whole; with what choosing a token then takes."""
    presets = SamplingParams(temperature=0.7, top_k=20, top_p=0.8)
    for rows, params in ((1, presets), (8, presets), (1, SamplingParams())):
        logits_TV = torch.randn(rows, trunk.config.vocab, device=trunk.device) ** 3
        row = SampleRow(params=params, position=9, history=TokenHistory((), repeat_last_n=0))
        times: dict[str, list[float]] = {"shortlists": [], "whole rows": []}
        for _ in range(4 * repeats + 1):
            for name, found in times.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                if name == "shortlists":
                    asked = [Asked(params=params, position=9)] * rows
                    listed = listed_rows(logits_TV, asked, trunk.shortlists)
                else:
                    listed = list(host_rows(logits_TV))
                for one in listed:
                    sample(one, row)
                found.append(time.perf_counter() - began)
        for name, found in times.items():
            report(
                results, f"sampling {rows} rows, top-k {params.top_k}, by {name}", found[1:], rows
            )


def report(results: dict[str, Any], name: str, times: list[float], tokens: int) -> None:
    middle = median(times)
    results[name] = {"s": times, "median_ms": middle * 1e3, "tokens_a_s": tokens / middle}
    print(f"{name}: {middle * 1e3:.2f} ms, {tokens / middle:.0f} tok/s", flush=True)


def profile(run: Any) -> None:
    """Time by kernel, from torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    table = found.key_averages().table(
        sort_by="cuda_time_total", row_limit=24, max_name_column_width=40
    )
    print("\n".join(line[:42] + line[-64:] for line in table.splitlines()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
