"""What choosing a token needs of a row of logits: its best tokens and a few sums. Plain torch.

Legend: T rows, V vocabulary, N tokens that are listed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from civetta.kernels.philox import gumbel

SUMS = 4
"""float64 columns before the tokens: sum of exp((x - max) / temperature), the same for a temperature
of 1, how many logits are NaN or infinite, and the score of the last token that is listed."""


def shortlists(logits_TV: Tensor, temperature_T: Tensor, drawn_T3: Tensor, keep: int) -> Tensor:
    """Sums and the `keep` best tokens of each row, float64 [T, SUMS + keep].

    logits float32 [T, V], rows may be strided; temperature float64 [T], above 0. drawn int64 [T, 3]:
    whether the best are those by logit (0) or by score, logit / temperature + Gumbel noise (1); the
    noise's seed, as 64 bits, and position (philox.py). The columns behind the sums are int32 words:
    `keep` ids, ascending, then the bits of their logits. Equal ones are taken from the lower id on.
    Scores are near: float32, and of the device's logarithm. Where V is less than `keep` the last ids
    are V, with logits of -inf. Rows with a NaN or an infinity say so in their sums; the rest of such
    a row means nothing.
    """
    rows, vocab = logits_TV.shape
    found = torch.empty((rows, SUMS + keep), dtype=torch.float64, device=logits_TV.device)
    gap_TV = logits_TV.double() - logits_TV.amax(-1, keepdim=True).double()
    found[:, 0] = (gap_TV / temperature_T[:, None]).exp().sum(-1)
    found[:, 1] = gap_TV.exp().sum(-1)
    found[:, 2] = (~logits_TV.isfinite()).sum(-1)
    score_TV = logits_TV + 0.0
    for t, (noisy, seed, position) in enumerate(drawn_T3.tolist()):
        if noisy:
            noise_V = gumbel(seed=seed % 2**64, position=position, ids_N=np.arange(vocab))
            wide_V = logits_TV[t].double() / temperature_T[t]
            score_TV[t] = (wide_V + torch.from_numpy(noise_V).to(wide_V.device)).float()
    best = torch.sort(score_TV, dim=-1, descending=True, stable=True).indices[:, :keep]
    found[:, 3] = score_TV.gather(1, best[:, -1:])[:, 0]
    ids = best.sort(-1).values
    words = found[:, SUMS:].view(torch.int32)
    words[:, :keep] = vocab
    words[:, keep:] = torch.tensor(float("-inf")).view(torch.int32)
    words[:, : ids.shape[1]] = ids
    words[:, keep : keep + ids.shape[1]] = logits_TV.gather(1, ids).view(torch.int32)
    return found
