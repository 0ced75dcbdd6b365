"""How fast a model of the real sizes goes from a disk to a GPU, against the disk's own rate.

    python benchmarks/gpu_loading.py FOLDER [--layers 8] [--repeats 2] [--device cuda] [--save FILE]
    python benchmarks/gpu_loading.py FOLDER --device cpu --layers 4 --tiny    # tries the program

A GGUF file with the shapes and types of Qwen3.8-Flash-Next's Q4_K_XL mix is written to FOLDER (about
1.75 GB a layer and 1.4 GB beside them; random codes, small finite steps, an n-gram table of few rows)
and deleted at the end. Then, in turn and each time with the file dropped from the page cache: a plain
read of the whole file, past the page cache where the file system allows it, with the best of some
numbers of threads and sizes of range; and civetta's own loading onto the device. A load is given with
where its time went: waiting for reads, copies to the device and the rest, which is packing.
On a CPU no model is packed in use; here its weights are packed into host memory, to try the program.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import statistics
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from civetta.checkpoint import formats
from civetta.kernels.select import select
from civetta.model.build import Counted, Loading, build_trunk, check_checkpoint
from civetta.model.gpu import weights as gpu
from civetta.model.gpu.random import TYPES, flash_next_config
from civetta.model.gpu.upload import Uploader
from civetta.model.stored import stored_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from civetta.checkpoint.formats import QuantFormat
    from civetta.model.config import ModelConfig

ALIGNMENT = 4096
PATTERN_BYTES = 64 << 20
NGRAM_BASE = 1000
STEPS = {"Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q5_1": (0, 2), "IQ4_NL": (0,)}
"""Where the halves of a block lie."""
RANGES = tuple(itertools.product((4, 8, 16), (16 << 20, 64 << 20)))
"""Threads and bytes of a range that a plain read is tried with."""

MIX = TYPES["q4_k_xl"]


# ---- the file ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    name: str
    shape: tuple[int, ...]
    format: QuantFormat

    @property
    def nbytes(self) -> int:
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return rows * self.format.row_bytes(self.shape[-1])


def sizes(args: argparse.Namespace) -> ModelConfig:
    c = flash_next_config(args.layers, NGRAM_BASE)
    if args.tiny:
        c = replace(c, hidden=256, vocab=1024, experts=16, expert_width=64, shared_width=64,
                    heads=4, gdn_key_heads=2, gdn_value_heads=4, stream_rank=64)  # fmt: skip
    return replace(c, experts=args.experts) if args.experts else c


def named_tensors(c: ModelConfig) -> list[Named]:
    """Names, shapes and types as in model.md C.2 and C.5."""
    found: list[Named] = []

    def add(name: str, kind: str, *shape: int) -> None:
        fmt = formats.by_name(kind)
        assert fmt is not None
        found.append(Named(name, shape, fmt))

    def hyper(at: str, *, inject: bool = True) -> None:
        add(at + "norm.weight", "F32", c.wide)
        add(at + "down.weight", MIX.outer, c.stream_rank, c.wide)
        add(at + "up.weight", MIX.outer, c.wide, c.stream_rank)
        if inject:
            add(at + "inject.weight", "F32", c.streams, c.wide)

    assert c.ple is not None
    add("token_embd.weight", MIX.outer, c.vocab, c.hidden)
    add("output.weight", MIX.outer, c.vocab, c.hidden)
    add("per_layer_token_embd.weight", MIX.table, c.ple.hash.rows, c.ple.row_values)
    hyper("output_hc_", inject=False)
    for layer, kind in enumerate(c.layer_kinds):
        at = f"blk.{layer}."
        hyper(at + "hc_attn_")
        hyper(at + "hc_ffn_")
        for name, stored_as, shape in (*_mixer(c, kind), *_mixture(c, layer)):
            add(at + name, stored_as, *shape)
        if layer == c.ple.layer:
            add(at + "ple_key.weight", MIX.outer, c.wide, c.ple.embed)
            add(at + "ple_value.weight", MIX.outer, c.hidden, c.ple.embed)
            for name in ("key", "query", "conv"):
                add(f"{at}ple_norm_{name}.weight", "F32", c.wide)
            add(at + "ple_conv1d.weight", "F32", c.wide, c.ple.conv_kernel)
    return found


def _mixer(c: ModelConfig, kind: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    wide, values = MIX.wide, c.gdn_value_heads * c.gdn_head_dim
    if kind == "gdn":
        yield "attn_qkv.weight", wide, (c.gdn_channels, c.hidden)
        yield "attn_gate.weight", wide, (values, c.hidden)
        yield "ssm_out.weight", wide, (c.hidden, values)
        yield "ssm_alpha.weight", "F32", (c.gdn_value_heads, c.hidden)
        yield "ssm_beta.weight", "F32", (c.gdn_value_heads, c.hidden)
        yield "ssm_conv1d.weight", "F32", (c.gdn_channels, c.gdn_conv_kernel)
        yield "ssm_a", "F32", (c.gdn_value_heads,)
        yield "ssm_dt.bias", "F32", (c.gdn_value_heads,)
        yield "ssm_norm.weight", "F32", (c.gdn_head_dim,)
        return
    yield "attn_q.weight", wide, (2 * c.heads * c.head_dim, c.hidden)
    yield "attn_k.weight", wide, (c.kv_heads * c.head_dim, c.hidden)
    yield "attn_v.weight", wide, (c.kv_heads * c.head_dim, c.hidden)
    yield "attn_output.weight", wide, (c.hidden, c.heads * c.head_dim)
    yield "attn_q_norm.weight", "F32", (c.head_dim,)
    yield "attn_k_norm.weight", "F32", (c.head_dim,)
    yield "indexer.q_proj.weight", "BF16", (c.index_heads * c.index_dim, c.hidden)
    yield "indexer.k_proj.weight", "BF16", (c.index_dim, c.hidden)
    yield "indexer.q_norm.weight", "F32", (c.index_dim,)
    yield "indexer.k_norm.weight", "F32", (c.index_dim,)


def _mixture(c: ModelConfig, layer: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    gate_up = MIX.odd_gate_up if layer in MIX.odd_gate_up_layers else MIX.gate_up
    down = MIX.odd_down if layer in MIX.odd_down_layers else MIX.down
    yield "ffn_gate_inp.weight", "F32", (c.experts, c.hidden)
    yield "ffn_gate_inp_shexp.weight", "F32", (c.hidden,)
    yield "ffn_gate_exps.weight", gate_up, (c.experts, c.expert_width, c.hidden)
    yield "ffn_up_exps.weight", gate_up, (c.experts, c.expert_width, c.hidden)
    yield "ffn_down_exps.weight", down, (c.experts, c.hidden, c.expert_width)
    yield "ffn_gate_shexp.weight", MIX.wide, (c.shared_width, c.hidden)
    yield "ffn_up_shexp.weight", MIX.wide, (c.shared_width, c.hidden)
    yield "ffn_down_shexp.weight", MIX.wide, (c.hidden, c.shared_width)


def keys(c: ModelConfig) -> dict[str, Any]:
    """The keys of model.md C.1 that a trunk is read by; a tuple is a list of 64-bit integers."""
    p = c.ple
    assert p is not None
    return {
        "block_count": c.layers,
        "context_length": c.context_tokens,
        "embedding_length": c.hidden,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_eps,
        "rope.dimension_sections": (*c.mrope_section, 0),
        "rope.freq_base": c.rope_theta,
        "rope.dimension_count": c.rope_dims,
        "expert_count": c.experts,
        "expert_used_count": c.experts_a_token,
        "expert_feed_forward_length": c.expert_width,
        "expert_shared_feed_forward_length": c.shared_width,
        "ssm.conv_kernel": c.gdn_conv_kernel,
        "ssm.state_size": c.gdn_head_dim,
        "ssm.group_count": c.gdn_key_heads,
        "ssm.time_step_rank": c.gdn_value_heads,
        "ssm.inner_size": c.gdn_value_heads * c.gdn_head_dim,
        "full_attention_interval": 4,
        "hyper_connection.count": c.streams,
        "hyper_connection.low_rank": c.stream_rank,
        "attention.indexer.head_count": c.index_heads,
        "attention.indexer.key_length": c.index_dim,
        "attention.indexer.top_k": c.index_budget,
        "attention.compress_ratios": tuple(
            c.index_ratio if kind == "qsa" else 0 for kind in c.layer_kinds
        ),
        "ple.layers": (p.layer,),
        "ple.ngram_size": p.hash.size,
        "ple.heads_per_ngram": p.hash.heads_per_ngram,
        "ple.conv_kernel": p.conv_kernel,
        "ple.eos_token_id": p.hash.eos_token_id,
        "embedding_length_per_layer_input": p.row_values,
        "ple.layer_multipliers": p.hash.multipliers,
        "ple.head_offsets": p.hash.offsets,
        "ple.head_vocab_sizes": p.hash.vocab_sizes,
    }


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, tuple):
        return struct.pack(f"<IIQ{len(value)}Q", 9, 10, len(value), *value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def header(c: ModelConfig, tensors: list[Named]) -> bytes:
    """A GGUF header of version 3, filled up to where data starts."""
    pairs = {"general.architecture": "qwen4exp", "general.alignment": ALIGNMENT}
    pairs |= {f"qwen4exp.{key}": value for key, value in keys(c).items()}
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(pairs))]
    out += [_string(key) + _value(value) for key, value in pairs.items()]
    at = 0
    for t in tensors:
        ne = t.shape[::-1]
        out.append(_string(t.name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne,
                                                 t.format.ggml_type, at))  # fmt: skip
        at += t.nbytes + -t.nbytes % ALIGNMENT
    whole = b"".join(out)
    return whole + bytes(-len(whole) % ALIGNMENT)


def pattern(fmt: QuantFormat, at_most: int) -> np.ndarray:
    """Random stored bytes of finite values, whole blocks."""
    random = np.random.default_rng(0)
    blocks = max(1, min(PATTERN_BYTES, at_most) // fmt.block_bytes)
    if fmt.name in {"F32", "BF16"}:
        numbers = random.standard_normal(blocks, np.float32) * np.float32(0.05)
        if fmt.name == "F32":
            return numbers.view(np.uint8)
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    raw = np.frombuffer(random.bytes(blocks * fmt.block_bytes), np.uint8).copy()
    raw = raw.reshape(blocks, fmt.block_bytes)
    for at in STEPS[fmt.name]:
        raw[:, at : at + 2] = np.array([1e-3], np.float16).view(np.uint8)
    return raw.ravel()


def write_model(path: Path, c: ModelConfig) -> int:
    """Write the file, onto the disk itself; its bytes."""
    tensors = named_tensors(c)
    most: dict[str, int] = {}
    for t in tensors:
        most[t.format.name] = max(most.get(t.format.name, 0), t.nbytes)
    patterns = {t.format.name: pattern(t.format, most[t.format.name]) for t in tensors}
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), header(c, tensors))
        for t in tensors:
            repeated, left = patterns[t.format.name], t.nbytes
            while left:
                left -= _write(file.fileno(), repeated[: min(left, len(repeated))])
            _write(file.fileno(), bytes(-t.nbytes % ALIGNMENT))
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _write(file: int, data: Any) -> int:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
    return len(data)


# ---- the disk ------------------------------------------------------------------------------------


def drop(path: Path) -> float:
    """Let the system forget the file's pages; the share that it kept nevertheless."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            start = np.frombuffer(pages, np.uint8).__array_interface__["data"][0]
            count = -(-len(pages) // mmap.PAGESIZE)
            there = (ctypes.c_ubyte * count)()
            call = ctypes.CDLL(None, use_errno=True).mincore
            if call(ctypes.c_void_p(start), ctypes.c_size_t(len(pages)), there):
                return float("nan")
            return float((np.frombuffer(there, np.uint8) & 1).mean())


def read_s(
    path: Path, start: int, stop: int, threads: int, range_bytes: int, *, direct: bool
) -> float:
    """Seconds to read part of a file in ranges; each thread takes the next one."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    file = os.open(path, flags)
    ranges = iter(range(start, stop, range_bytes))
    lock = threading.Lock()
    kept = [mmap.mmap(-1, range_bytes) for _ in range(threads)]  # aligned as O_DIRECT wants it
    for one in kept:
        one[:] = bytes(range_bytes)  # its pages are there before the clock runs

    def work(buffer: mmap.mmap) -> None:
        view = memoryview(buffer)
        while True:
            with lock:
                at = next(ranges, None)
            if at is None:
                return
            size, done = min(range_bytes, stop - at), 0
            while done < size:
                got = os.preadv(file, [view[done : size if not direct else None]], at + done)
                if not got:
                    return  # the file's end
                done += got

    try:
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(work, kept))
            return time.perf_counter() - began
    finally:
        os.close(file)


def can_read_direct(path: Path) -> bool:
    try:
        read_s(path, 0, ALIGNMENT, 1, ALIGNMENT, direct=True)
    except OSError:
        return False
    return True


def best_ranges(path: Path, *, direct: bool) -> tuple[int, int]:
    """Threads and bytes of a range that read fastest; each is tried on a part of its own."""
    drop(path)
    part = path.stat().st_size // len(RANGES) // ALIGNMENT * ALIGNMENT
    part = min(part, 2 << 30)
    rates = {}
    for i, (threads, range_bytes) in enumerate(RANGES):
        s = read_s(path, i * part, (i + 1) * part, threads, range_bytes, direct=direct)
        rates[threads, range_bytes] = part / s / 1e9
        print(
            f"  {threads} threads, {range_bytes >> 20} MiB: {part / s / 1e9:.2f} GB/s", flush=True
        )
    return max(rates, key=lambda k: rates[k])


# ---- loading -------------------------------------------------------------------------------------


class Watched(Uploader):
    """Times what the uploader's own thread does."""

    last: Watched | None = None

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.wait_s, self.copy_s, self.marks = 0.0, 0.0, []
        Watched.last = self

    def wait(self, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return super().wait(*args)
        finally:
            self.wait_s += time.perf_counter() - began

    def copy(self, *args: Any) -> Any:
        began = time.perf_counter()
        before = self._mark()
        try:
            return super().copy(*args)
        finally:
            self.copy_s += time.perf_counter() - began
            self.marks.append((before, self._mark()))

    def _mark(self) -> Any:
        if not torch.cuda.is_available():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def device_copy_s(self) -> float | None:
        """Time of the copies on the device's own clock."""
        if not torch.cuda.is_available():
            return None
        return sum(a.elapsed_time(b) for a, b in self.marks) / 1e3


class Memory:
    """The most host memory of this process while it runs: its own, and mapped files'."""

    def __init__(self) -> None:
        self.own_bytes = self.mapped_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            lines = dict(
                line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
            )
            read = {k: int(lines[k].split()[0]) << 10 for k in ("RssAnon", "RssFile", "RssShmem")
                    if k in lines}  # fmt: skip
            self.own_bytes = max(self.own_bytes, read.get("RssAnon", 0) + read.get("RssShmem", 0))
            self.mapped_bytes = max(self.mapped_bytes, read.get("RssFile", 0))


def load(path: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """One load as the command line does it; seconds, where they went, and memory."""
    told: list[tuple[float, int, int]] = []
    plan: dict[str, int] = {}
    on_gpu = device.type != "cpu"
    if on_gpu:
        from civetta.kernels.gpu import gpu_ops

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    began = time.perf_counter()

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "weights":
            told.append((time.perf_counter() - began, done, total))

    def room(nbytes: int, _: ModelConfig) -> None:
        plan["bytes"] = nbytes

    loading = Loading(room=room, progress=progress)
    with Memory() as host:
        checked = check_checkpoint(path)
        trunk = build_trunk(
            checked,
            dtype=dtype,
            ops=gpu_ops() if on_gpu else select("cpu", 1),
            device=device,
            loading=loading,
        )
        packed = None
        if on_gpu:
            torch.cuda.synchronize()
        else:
            room(gpu.device_bytes(trunk.weights, dtype), checked.config)
            counted = Counted("weights", stored_bytes(trunk.weights), progress)
            packed = gpu.gpu_weights(
                trunk.weights, trunk.config, device, dtype, counted, place=checked.checkpoint.place
            )
        total_s = time.perf_counter() - began
    watched = Watched.last
    assert watched is not None, "nothing was loaded through the uploader"
    found: dict[str, Any] = {
        "s": total_s,
        "read_wait_s": watched.wait_s,
        "copy_call_s": watched.copy_s,
        "device_copy_s": watched.device_copy_s(),
        "other_s": total_s - watched.wait_s - watched.copy_s,
        "uploaded_bytes": watched.done_bytes,
        "host_own_peak_bytes": host.own_bytes,
        "host_mapped_peak_bytes": host.mapped_bytes,
        "planned_device_bytes": plan["bytes"],
        "told": told,
    }
    if on_gpu:
        found["device_bytes"] = torch.cuda.memory_allocated() - base
        found["device_peak_bytes"] = torch.cuda.max_memory_allocated() - base
    Watched.last = None
    trunk.close()
    del trunk, packed, watched
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=0, help="fewer experts than 512")
    parser.add_argument("--tiny", action="store_true", help="small widths, to try the program")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    if args.layers < 4:
        parser.error("--layers: at least 4, for the fourth is the first with sparse attention")
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / "gpu_loading.gguf"
    gpu.Uploader = Watched  # type: ignore[misc]
    try:
        results = measure(path, args)
    finally:
        path.unlink(missing_ok=True)
    print(json.dumps({k: v for k, v in results.items() if k != "loads"}, indent=1))
    if args.save:
        args.save.write_text(json.dumps(results, indent=1) + "\n")


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the context is there before the clock runs
    began = time.perf_counter()
    size = write_model(path, sizes(args))
    written_s = time.perf_counter() - began
    print(f"wrote {size / 1e9:.2f} GB in {written_s:.1f} s", flush=True)
    direct = can_read_direct(path)
    threads, range_bytes = best_ranges(path, direct=direct)
    kept, disk, loads = [], [], []
    for i in range(args.repeats):
        kept.append(drop(path))
        s = read_s(path, 0, size, threads, range_bytes, direct=direct)
        disk.append(size / s / 1e9)
        kept.append(drop(path))
        loads.append(load(path, device, dtype))
        own = loads[-1]
        own["gb_a_s"] = size / own["s"] / 1e9
        print(
            f"{i}: disk {disk[-1]:.2f} GB/s, load {own['gb_a_s']:.2f} GB/s,"
            f" ratio {own['gb_a_s'] / disk[-1]:.2f}; of {own['s']:.1f} s waited for reads"
            f" {own['read_wait_s']:.1f}, in copies {own['copy_call_s']:.1f}, else {own['other_s']:.1f}",
            flush=True,
        )
    rates = [one["gb_a_s"] for one in loads]
    results: dict[str, Any] = {
        "args": {k: str(v) for k, v in vars(args).items() if k != "folder"},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "file_bytes": size,
        "written_gb_a_s": size / written_s / 1e9,
        "direct_reads": direct,
        "best_threads_and_range": (threads, range_bytes),
        "kept_in_page_cache": kept,
        "disk_gb_a_s": disk,
        "load_gb_a_s": rates,
        "load_over_disk": [a / b for a, b in zip(rates, disk, strict=True)],
        "load_over_disk_median": statistics.median(a / b for a, b in zip(rates, disk, strict=True)),
        "loads": loads,
    }
    for name in ("read_wait_s", "copy_call_s", "device_copy_s", "other_s", "s", "uploaded_bytes",
                 "host_own_peak_bytes", "host_mapped_peak_bytes", "planned_device_bytes",
                 "device_bytes", "device_peak_bytes"):  # fmt: skip
        results[name] = [one.get(name) for one in loads]
    return results


if __name__ == "__main__":
    sys.exit(main())
