"""What the vision tower needs beside the trunk's ops, in plain torch (model.md D.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def layer_norm(x: Tensor, gain_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
    """(x - mean) / std * gain + shift over the last dimension; see `Ops.layer_norm`."""
    return functional.layer_norm(x.float(), gain_D.shape, gain_D, shift_D, eps)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of gelu; see `Ops.gelu_tanh`."""
    return functional.gelu(x.float(), approximate="tanh")


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), by erf; see `Ops.gelu`."""
    return functional.gelu(x.float())


def attend_image(q_THA: Tensor, k_PHA: Tensor, v_PHA: Tensor) -> Tensor:
    """Attention without mask; see `Ops.attend_image`."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THA, k_PHA, v_PHA))
    return functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)
