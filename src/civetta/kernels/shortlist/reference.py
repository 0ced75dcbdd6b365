"""What choosing a token needs of a row of logits: its best tokens and two sums. Plain torch.

Legend: T rows, V vocabulary, N tokens that are listed.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUMS = 3
"""float64 columns before the tokens: sum of exp((x - max) / temperature), the same for a temperature
of 1, and how many logits are NaN or infinite."""


def shortlists(logits_TV: Tensor, temperature_T: Tensor, keep: int) -> Tensor:
    """Sums and the `keep` best tokens of each row, float64 [T, SUMS + keep].

    logits float32 [T, V], rows may be strided; temperature float64 [T], above 0. The columns behind
    the sums are int32 words: `keep` ids, ascending, then the bits of their logits. Equal logits are
    taken from the lower id on. Where V is less than `keep` the last ids are V, with logits of -inf.
    Rows with a NaN or an infinity say so in their sums; the rest of such a row means nothing.
    """
    rows, vocab = logits_TV.shape
    found = torch.empty((rows, SUMS + keep), dtype=torch.float64, device=logits_TV.device)
    gap_TV = logits_TV.double() - logits_TV.amax(-1, keepdim=True).double()
    found[:, 0] = (gap_TV / temperature_T[:, None]).exp().sum(-1)
    found[:, 1] = gap_TV.exp().sum(-1)
    found[:, 2] = (~logits_TV.isfinite()).sum(-1)
    best = torch.sort(logits_TV + 0.0, dim=-1, descending=True, stable=True).indices[:, :keep]
    ids = best.sort(-1).values
    words = found[:, SUMS:].view(torch.int32)
    words[:, :keep] = vocab
    words[:, keep:] = torch.tensor(float("-inf")).view(torch.int32)
    words[:, : ids.shape[1]] = ids
    words[:, keep : keep + ids.shape[1]] = logits_TV.gather(1, ids).view(torch.int32)
    return found
