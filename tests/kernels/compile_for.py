"""Compile every kernel launch of the GPU's paths for named targets, without a GPU.

    python tests/kernels/compile_for.py [--share I/N] [--only WORD] [--list] cuda:90 hip:gfx942 ...
    python tests/kernels/compile_for.py --rotate cuda:80 cuda:90 ...

The table of ops and the layers of the fused trunk run on CPU tensors with launches recorded instead
of made; each recorded launch is compiled with its own types, constants and alignments, in the form
that the target would meet it in (precision of float32 products, decoding of E4M3).

--share compiles one launch of N, from the I-th on; --only those whose description has WORD in it
(kernel, stored format, dtype); --list compiles nothing. --rotate compiles one launch of each kernel
and stored format, in float16, each for one of the targets; products of E4M3 formats, which differ
from target to target, for all of them. Prints one line a target; a failure is a traceback behind
the launch's description.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_inputs import Random

from civetta.decode.shortlist import KEEP
from civetta.kernels.fused import choice
from civetta.kernels.fused.launch import ROW_FIELDS, SESSION_FIELDS, Batch
from civetta.kernels.fused.streams import enter, mix
from civetta.kernels.gdn import triton as gdn
from civetta.kernels.gpu import gpu_ops
from civetta.kernels.matmul import dense, tiling
from civetta.kernels.matmul import triton as matmul
from civetta.kernels.moe import triton as moe
from civetta.kernels.packed import STORED, PackedExperts, PackedHyper, pack, pack_stack
from civetta.kernels.packed_fields import RECIPES, Recipe
from civetta.kernels.ple import triton as ple
from civetta.kernels.qsa import triton as qsa
from civetta.kernels.residual import triton as residual
from civetta.kernels.shortlist.triton import shortlists
from civetta.model.gpu.random import flash_next_config, random_weights, write_random_table
from civetta.model.gpu.trunk import GpuTrunk
from civetta.model.mixes import MIXES, Mix
from civetta.ngram.feed import RowFeed
from civetta.ngram.placement import StoreOptions, open_store

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
FORMATS = (*RECIPES, *STORED)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch in the form that the compiler takes; alignments by place of the argument."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    options: dict[str, int]


class Recorder:
    """Launches by their description, which starts with the kernel's name and `what` was called."""

    def __init__(self) -> None:
        self.found: dict[str, Launch] = {}
        self.what = ""

    def take(self, kernel: JITFunction, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        options = {k: named.pop(k) for k in ("num_warps", "num_stages") if k in named}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        signature, constants, aligned = {}, {}, []
        for i, parameter in enumerate(kernel.params):
            name, value = parameter.name, values[parameter.name]
            one = value == 1 if isinstance(value, int) else False
            if parameter.is_constexpr or (one and not parameter.do_not_specialize):
                constants[name], signature[name] = value, "constexpr"
                continue
            if isinstance(value, TensorDescriptor):
                signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
                continue
            if isinstance(value, torch.Tensor):
                signature[name], place = "*" + TYPES[value.dtype], value.data_ptr()
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                place = value if isinstance(value, int) else 1
            if place % 16 == 0 and not parameter.do_not_specialize:
                aligned.append(i)
        launch = Launch(
            kernel=kernel,
            signature=signature,
            constants=constants,
            aligned=tuple(aligned),
            options=options,
        )
        key = f"{kernel.__name__} {signature} {constants} {aligned} {options}"
        if not any(described.endswith(key) for described in self.found):
            self.found[f"{kernel.__name__} ({self.what}) {key}"] = launch


def record(dtypes: tuple[torch.dtype, ...], mixes: tuple[Mix, ...]) -> dict[str, Launch]:
    """What the paths launch; launches that differ in nothing are one."""
    recorder = Recorder()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        del grid, warmup
        recorder.take(self, args, named)

    real, empty = JITFunction.run, torch.empty
    JITFunction.run, torch.empty = run, torch.zeros  # no index made of garbage
    try:
        for dtype in dtypes:
            for name in FORMATS:
                recorder.what = f"{name} {dtype}"
                launch_format(name, dtype)
            recorder.what = f"table {dtype}"
            launch_table(dtype)
            recorder.what = f"trunk {dtype}"
            launch_trunk("q4_k_xl", dtype)
        for mix_name in mixes:
            recorder.what = f"trunk {mix_name}"
            launch_trunk(mix_name, F16)
        recorder.what = "choice"
        launch_choice()
        recorder.what = "sampling"
        launch_sampling()
    finally:
        JITFunction.run, torch.empty = real, empty
    return recorder.found


OPERANDS = {
    "product_kernel": "x",
    "two_products_kernel": "x",
    "mix_kernel": "m",
    "unpack_kernel": "y",
}
"""What has the operands' dtype."""


def decoded(launch: Launch, which: str) -> str:
    """The code that `recipe_on` names on NVIDIA for the launch's weight and operands; `which`: "A_" or
    "B_" where there are two."""
    c = {name.removeprefix(which): value for name, value in launch.constants.items()}
    operand = OPERANDS.get(launch.kernel.__name__)
    if operand is None:
        return str(c["CODE"])
    dtype = launch.signature[which.lower() + operand]
    recipe = Recipe(
        bits=c["BITS"], code=c["CODE"], offset=c["OFFSET"], group=c["GROUP"], scale=c["SCALE"],
        span=c["SPAN"], low=c["LOW"],
    )  # fmt: skip
    if dtype == "*fp16" and recipe in tiling.PAIRED:
        return f"{recipe.code} pairs"
    return (
        "linear raised" if dtype in {"*fp16", "*bf16"} and recipe in tiling.RAISED else recipe.code
    )


def for_target(launch: Launch, target: GPUTarget) -> Launch:
    """A launch recorded on the CPU as `tiling` and the delta rule have it on the target: TF32 and
    numbers decoded in pairs on NVIDIA, conversion of E4M3 from compute capability 8.9 on."""
    if target.backend != "cuda":
        return launch
    mixed = launch.signature.get("mixed")  # rows of the delta rule, whose sums are as fine as they
    exact = {"PRECISE": "tf32x3", "EXACT": "tf32x3" if mixed == "*fp32" else "tf32"}

    def met(name: str, value: Any) -> Any:
        which = name[:2] if name[:2] in {"A_", "B_"} else ""
        if value == "ieee":
            return exact[name.removeprefix(which)]
        if name == f"{which}CODE" and value in {"int8", "linear"}:
            return decoded(launch, which)
        return "fp8" if value == "fp8 bits" and int(target.arch) >= 89 else value

    constants = {name: met(name, value) for name, value in launch.constants.items()}
    return replace(launch, constants=constants)


def launch_format(name: str, dtype: torch.dtype) -> None:
    """Products of one stored format: few rows, many, experts met directly and sorted, streams."""
    random, d = Random(0), 256

    def matrix(rows: int, cols: int) -> Any:
        if name in STORED:
            return random.normal(rows, cols, dtype=STORED[name])
        return random.stored(name, rows, cols)

    w = pack(matrix(64, d), dtype, "cpu")
    for rows in (1, 3, 200):
        matmul.matmul(random.normal(rows, d, dtype=dtype), w, dtype)
    deep = pack(matrix(64, 1024), dtype, "cpu")  # in parts
    for rows in (3, 200):
        matmul.matmul(random.normal(rows, 1024, dtype=dtype), deep, F32)
    pairs = pack_stack([matrix(128, d) for _ in range(4)], dtype, "cpu", pair=True)
    for rows in (2, 40):
        ids = torch.arange(rows) % 4
        y = torch.empty((rows, 64), dtype=dtype)
        x = random.normal(rows, d, dtype=dtype)
        if rows == 2:
            matmul.product(x, pairs, y, None, experts_M=ids)
        else:
            matmul.product(x, pairs, y, None, groups=moe.group_rows(ids[:, None], 4))
    hyper = PackedHyper(
        gain_SD=random.normal(4, d),
        down=pack(matrix(256, 4 * d), dtype, "cpu"),
        up=pack_stack([matrix(d, 256) for _ in range(4)], dtype, "cpu"),
        inject=random.normal(4, 4 * d),
    )
    for rows in (3, 200):
        x_TSD = random.normal(rows, 4, d)
        entered = enter(x_TSD, hyper, 1e-6, dtype, None)
        mix(x_TSD, entered, hyper, matmul.counters(CPU))


def launch_table(dtype: torch.dtype) -> None:
    """Real widths where they decide a kernel's shape; few rows."""
    random = Random(0)
    d, streams, heads = 256, 4, 24
    x = random.normal(3, d, dtype=dtype)
    stack = pack_stack([random.stored("Q4_K", d, d) for _ in range(4)], dtype, "cpu")
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])
    moe.experts(x, ids, random.uniform(3, 2), PackedExperts(gate=stack, up=stack, down=stack))
    moe.route(random.normal(3, 512), 10)
    w = pack(random.stored("Q8_0", d, d), dtype, "cpu")
    launch_written_out(w, dtype)
    wide = random.normal(3, streams, d)
    hyper = PackedHyper(
        gain_SD=random.normal(streams, d),
        down=pack(random.normal(32, streams * d), dtype, "cpu"),
        up=pack(random.normal(streams * d, 32), dtype, "cpu"),
        inject=random.normal(streams, streams * d),
    )
    residual.hyper_read(wide, hyper, 1e-6, dtype)
    residual.hyper_write(wide, x, random.normal(3, streams))
    cos = random.normal(3, 32)
    residual.rope(random.normal(3, heads, 256, dtype=dtype), cos, cos)
    gdn.short_conv(x, x, random.normal(d, 4), 1)
    gates = random.normal(3, 48)
    gdn.gdn_gates(gates, gates, gates[0], gates[0])
    qk, v = random.normal(3, 16, 128, dtype=dtype), random.normal(3, 48, 128, dtype=dtype)
    gdn.gdn_chunks(qk, qk, v, gates, gates, random.normal(48, 128, 128), True, 1, 0)
    gdn.gdn_norm(v, v, random.normal(128), 1e-6)
    raw = random.normal(5, 4, 128, dtype=dtype)
    qsa.index_pool(raw, random.normal(128), 1e-6, random.normal(5, 32), random.normal(5, 32))
    table, keys = torch.arange(9), random.normal(9, 16, 128, dtype=dtype)
    blocks = torch.tensor([140, 141])
    qsa.index_select(random.normal(2, 4, 128, dtype=dtype), keys, table, blocks, 128)
    pages = random.normal(9, 64, 2, 256, dtype=dtype)
    q = random.normal(2, heads, 256, dtype=dtype)
    qsa.attend_dense(q, pages, pages, table, 500)
    qsa.attend_sparse(q, pages, pages, table, torch.arange(515).expand(2, -1))
    ple.ple_gate(wide, wide, random.normal(3, d), hyper.gain_SD, hyper.gain_SD, 1e-6)


def launch_written_out(w: Any, dtype: torch.dtype) -> None:
    """Many rows with a weight written out, loaded by pointers and by descriptors; whole and in parts."""
    random = Random(1)
    deep = pack(random.stored("Q8_0", 64, 1024), dtype, "cpu")
    wide = pack(random.normal(dense.WIDE_OUTPUTS, 64, dtype=dtype), dtype, "cpu")
    real = dense.has_descriptors
    for described in (False, True):
        dense.has_descriptors = lambda _, described=described: described
        for weight in (w, deep, wide):
            matmul.matmul(torch.zeros(2048, weight.cols, dtype=dtype), weight, dtype)
    dense.has_descriptors = real


def launch_trunk(mix_name: Mix, dtype: torch.dtype) -> None:
    """A trunk of four layers with the real heads, streams and n-gram layer: 1, 20 and 100 rows."""
    config = replace(
        flash_next_config(4, 61), hidden=512, vocab=640, experts=8, expert_width=256,
        shared_width=256, stream_rank=64, context_tokens=1 << 20,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        layout = write_random_table(config, mix_name, Path(folder) / "table")
        store = open_store(layout, StoreOptions(placement="ram"), device=CPU, other_bytes=0)
        assert config.ple is not None
        feed = RowFeed(config.ple.hash, store, dtype=dtype, device=CPU)
        weights = random_weights(config, mix_name, CPU)
        trunk = GpuTrunk(config, None, weights, gpu_ops(), dtype, feed, device=CPU)
        for rows in (1, 20, 100):
            session = trunk.store(sessions=1, context_tokens=rows).open()
            trunk.forward(session, [i % 600 for i in range(rows)], "last")
        trunk.close()


def launch_choice() -> None:
    """Choice of blocks in one segment, in several, in passes, and of many rows."""
    for most in (1 << 10, 1 << 16, 1 << 18):
        batch = Batch(
            rows_FT=torch.zeros((len(ROW_FIELDS), 2), dtype=torch.int64),
            sessions_FB=torch.zeros((len(SESSION_FIELDS), 1), dtype=torch.int64),
            rows=2,
            sessions=1,
            most_rows=2,
            in_place=True,
            table_tokens=4 * most,
            counts=matmul.counters(CPU),
        )
        kept = torch.zeros((2, 512), dtype=torch.int32)
        choice._select(batch, torch.zeros(2, most), kept, 0, 4)
    rows, most = 100, 1 << 10
    batch = replace(
        batch, rows=rows, most_rows=rows, in_place=False, table_tokens=4 * most,
        rows_FT=torch.zeros((len(ROW_FIELDS), rows), dtype=torch.int64),
    )  # fmt: skip
    keys, iq = torch.zeros(most // 16, 16, 128, dtype=F16), torch.zeros(rows, 4, 128, dtype=F16)
    choice.choose(batch, keys, iq, 4, 512)


def launch_sampling() -> None:
    """Shortlists of rows of the real vocabulary."""
    drawn = torch.zeros((2, 3), dtype=torch.int64)
    shortlists(torch.zeros(2, 248_320), torch.ones(2, dtype=torch.float64), drawn, KEEP)


def target_of(name: str) -> GPUTarget:
    backend, _, arch = name.partition(":")
    if backend == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def loads_by_descriptors(target: GPUTarget) -> bool:
    """Whether `dense` would launch its kernel of tensor descriptors there."""
    return target.backend == "cuda" and 90 <= int(target.arch) < 120


def compile_launch(launch: Launch, target: GPUTarget) -> Any:
    source = triton.compiler.ASTSource(
        launch.kernel,
        launch.signature,
        launch.constants,
        {(i,): [["tt.divisibility", 16]] for i in launch.aligned},
    )
    return triton.compile(source, target=target, options=launch.options)


def rotated(found: dict[str, Launch], targets: list[str]) -> dict[str, list[str]]:
    """By target: the first launch of each kernel and stored format on one of the targets in turn,
    products of E4M3 on all."""
    firsts: dict[tuple[str, str], str] = {}
    for key, launch in found.items():
        what = key.split(" (", 1)[1]
        name = what.split(" ", 1)[0]
        kernel = f"{launch.kernel.__module__} {launch.kernel.__name__}"  # names are used twice
        firsts.setdefault((kernel, name if name in FORMATS else ""), key)
    chosen: dict[str, list[str]] = {name: [] for name in targets}
    for i, ((kernel, name), key) in enumerate(firsts.items()):
        every = kernel.endswith("product_kernel") and name in {"F8_E4M3", "NVFP4"}
        able = [t for t in targets if "tensordesc" not in key or loads_by_descriptors(target_of(t))]
        for target in targets if every else [able[i % len(able)]] if able else []:
            chosen[target].append(key)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rotate", action="store_true")
    args = parser.parse_args()
    if args.rotate:
        found = record((F16,), ("fp8",))
        chosen = rotated(found, args.targets)
    else:
        found = record((F16, BF16, F32), MIXES)
        first, of = (int(n) for n in args.share.split("/"))
        some = [key for key in found if args.only in key][first::of]
        chosen = dict.fromkeys(args.targets, some)
    for name, keys in chosen.items():
        target, began = target_of(name), time.perf_counter()
        for key in keys:
            if "tensordesc" in key and not loads_by_descriptors(target):
                continue
            if args.list:
                print(f"{name}: {key}")  # noqa: T201 - a program
                continue
            try:
                compile_launch(for_target(found[key], target), target)
            except BaseException:
                print(f"{name}: {key}", file=sys.stderr, flush=True)  # noqa: T201 - a program
                raise
        seconds = time.perf_counter() - began
        print(f"{name}: {len(keys)} launches compiled in {seconds:.0f} s", flush=True)  # noqa: T201 - a program
    return 0


if __name__ == "__main__":
    sys.exit(main())
