"""Choose the implementation of every op once, at start."""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import replace

import torch

from civetta.errors import UsageError
from civetta.kernels import cpu
from civetta.kernels.gdn import reference as gdn
from civetta.kernels.matmul import reference as matmul
from civetta.kernels.moe import reference as moe
from civetta.kernels.ops import Ops
from civetta.kernels.ple import reference as ple
from civetta.kernels.qsa import reference as qsa
from civetta.kernels.residual import reference as residual
from civetta.kernels.vision import reference as vision

log = logging.getLogger(__name__)

REFERENCE = Ops(
    name="reference",
    embed=matmul.embed,
    matmul=matmul.matmul,
    rms_norm=residual.rms_norm,
    hyper_read=residual.hyper_read,
    hyper_write=residual.hyper_write,
    short_conv=gdn.short_conv,
    gdn_gates=gdn.gdn_gates,
    gdn_chunks=gdn.gdn_chunks,
    gdn_norm=gdn.gdn_norm,
    rope=residual.rope,
    index_pool=qsa.index_pool,
    index_select=qsa.index_select,
    attend_dense=qsa.attend_dense,
    attend_sparse=qsa.attend_sparse,
    route=moe.route,
    experts=moe.experts,
    swiglu=residual.swiglu,
    ple_gate=ple.ple_gate,
    layer_norm=vision.layer_norm,
    gelu_tanh=vision.gelu_tanh,
    gelu=vision.gelu,
    attend_image=vision.attend_image,
)


def resolve_device(name: str) -> torch.device:
    """The device that `--device` names: "auto", "cpu", "cuda", "cuda:N" (ROCm's GPUs too).

    "auto" is the CPU until the whole model has been proved on a GPU (docs/measurements/h200.md).
    Raises UsageError for a name torch does not know or a GPU that is not there.
    """
    if name == "auto":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    triton = importlib.util.find_spec("triton") is not None
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdigit()) or name == "cpu:":
        raise UsageError(f"--device {name} is no device; give auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    index = int(number or 0)
    if index >= gpus:
        raise UsageError(f"--device {name} is not there: torch sees {gpus} GPUs; use --device cpu")
    if not triton:
        raise UsageError(f"--device {name} needs Triton: pip install triton, or use --device cpu")
    return torch.device("cuda", index)


def select(device: torch.device | str, threads: int = 0) -> Ops:
    """The fastest table for a device; `threads` CPU threads (0: all cores).

    With the compiled table torch is left one thread for the little it still does: its workers spin
    on the cores after every parallel region, and each small op then waits for ours to make room.

    A GPU's table reads weights in the form that `model.place` gives them. Raises UsageError for a
    device that is not there.
    """
    device = resolve_device(device) if isinstance(device, str) else device
    if device.type == "cuda":
        from civetta.kernels.gpu import gpu_ops

        return gpu_ops()
    if not cpu.available():
        log.info("the native extension is not built: products run through torch, which is slower")
        return REFERENCE
    from civetta.kernels import cpu_mixers, cpu_rows

    torch.set_num_threads(1)
    products = cpu.CpuProducts(threads or os.cpu_count() or 1)
    return replace(
        REFERENCE,
        name=f"cpu-{cpu.instructions()}",
        matmul=products.matmul,
        experts=products.experts,
        rms_norm=cpu_rows.rms_norm,
        hyper_read=products.hyper_read,
        hyper_write=cpu_rows.hyper_write,
        short_conv=cpu_mixers.short_conv,
        gdn_gates=cpu_mixers.gdn_gates,
        gdn_chunks=cpu_mixers.gdn_chunks,
        gdn_norm=cpu_mixers.gdn_norm,
        rope=cpu_rows.rope,
        index_pool=cpu_rows.index_pool,
        index_select=cpu_mixers.index_select,
        attend_dense=cpu_mixers.attend_dense,
        attend_sparse=cpu_mixers.attend_sparse,
        route=cpu_rows.route,
        swiglu=cpu_rows.swiglu,
        ple_gate=cpu_rows.ple_gate,
        attend_image=cpu_mixers.attend_image,
    )
