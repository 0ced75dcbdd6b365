"""Compile every kernel launch of the GPU ops for named targets, without a GPU.

    python tests/kernels/compile_for.py [--fewest] cuda:90 hip:gfx942 ...

The ops run on CPU tensors with launches recorded instead of made; each recorded launch is compiled
with its own types and constants. --fewest leaves
out float32 and all but two stored formats. Prints one line a target; a failure is a traceback.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from triton_inputs import Random

from civetta.kernels.gdn import triton as gdn
from civetta.kernels.matmul import triton as matmul
from civetta.kernels.moe import triton as moe
from civetta.kernels.packed import PackedExperts, PackedHyper, pack, pack_stack
from civetta.kernels.ple import triton as ple
from civetta.kernels.qsa import triton as qsa
from civetta.kernels.residual import triton as residual

BF16, F32 = torch.bfloat16, torch.float32
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
Launch = tuple[JITFunction, dict[str, str], dict[str, Any], dict[str, int]]


def record(launches: dict[str, Launch]) -> None:
    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        del grid, warmup
        options = {k: kwargs.pop(k) for k in ("num_warps", "num_stages") if k in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        signature, constants = {}, {}
        for parameter in self.params:
            value = values[parameter.name]
            if parameter.is_constexpr:
                constants[parameter.name] = value
                signature[parameter.name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPES[value.dtype]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        key = f"{self.__name__} {signature} {constants}"
        launches[key] = (self, signature, constants, options)

    JITFunction.run = run  # type: ignore[method-assign]


FORMATS = ("Q4_K", "Q8_0", "Q4_0", "Q5_1", "Q5_K", "Q6_K", "IQ4_XS", "F8_E4M3", "NVFP4")


def launch_everything(dtype: torch.dtype, formats: tuple[str, ...]) -> None:
    """Real widths where they decide a kernel's shape; few rows."""
    random = Random(0)
    d, streams, heads = 256, 4, 24
    x = random.normal(3, d, dtype=dtype)
    for fmt in formats:
        matmul.matmul(x, pack(random.stored(fmt, 64, d), dtype, "cpu"), dtype)
    matmul.matmul(random.normal(200, d, dtype=dtype), pack(random.normal(64, d), dtype, "cpu"), F32)
    matmul.matmul(random.normal(2, 2048), pack(random.normal(64, 2048), F32, "cpu"), F32)
    stack = pack_stack([random.stored("Q4_K", d, d) for _ in range(4)], dtype, "cpu")
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])
    moe.experts(x, ids, random.uniform(3, 2), PackedExperts(gate=stack, up=stack, down=stack))
    moe.route(random.normal(3, 512), 10)
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


def target(name: str) -> GPUTarget:
    backend, _, arch = name.partition(":")
    if backend == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def main() -> None:
    launches: dict[str, Launch] = {}
    record(launches)
    names = sys.argv[1:]
    fewest = "--fewest" in names
    for dtype in (BF16,) if fewest else (BF16, F32):
        launch_everything(dtype, FORMATS[:2] if fewest else FORMATS)
    for name in [n for n in names if n != "--fewest"]:
        for kernel, signature, constants, options in launches.values():
            source = triton.compiler.ASTSource(kernel, signature, constants)
            triton.compile(source, target=target(name), options=options)
        print(  # noqa: T201 - a program
            f"{name}: {len(launches)} launches compiled", flush=True
        )


if __name__ == "__main__":
    main()
