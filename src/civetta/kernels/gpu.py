"""The table of Triton kernels, for NVIDIA and AMD GPUs."""

from __future__ import annotations

from typing import Any

from civetta.kernels.gdn import triton as gdn
from civetta.kernels.matmul import triton as matmul
from civetta.kernels.matmul.reference import embed
from civetta.kernels.moe import triton as moe
from civetta.kernels.ops import Ops
from civetta.kernels.ple import triton as ple
from civetta.kernels.qsa import triton as qsa
from civetta.kernels.residual import triton as residual
from civetta.kernels.vision import reference as vision


def gpu_ops() -> Ops:
    """Every op of the text model as a Triton kernel.

    The embedding is a gather, which torch does row by row. The vision tower's own ops are torch's:
    an image is always cut in the same way, so their bits may follow the shape.
    """
    # These take packed weights where the contract says stored ones: model.place made them so.
    packed: dict[str, Any] = {
        "matmul": matmul.matmul,
        "hyper_read": residual.hyper_read,
        "experts": moe.experts,
    }
    return Ops(
        name="triton",
        embed=embed,
        rms_norm=residual.rms_norm,
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
        swiglu=residual.swiglu,
        ple_gate=ple.ple_gate,
        layer_norm=vision.layer_norm,
        gelu_tanh=vision.gelu_tanh,
        gelu=vision.gelu,
        attend_image=vision.attend_image,
        **packed,
    )
