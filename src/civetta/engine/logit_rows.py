"""Rows of logits on their way to the host: all of them from a CPU, shortlists of a GPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from civetta.decode.shortlist import KEEP, ListedRow, Shortlist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from civetta.decode.shortlist import Asked, LogitRow


def host_rows(logits_TV: Tensor) -> NDArray[np.float32]:
    """The rows, float32 [T, V], in the host's memory."""
    rows_TV: NDArray[np.float32] = logits_TV.float().cpu().numpy()
    return rows_TV


def listed_rows(
    logits_TV: Tensor,
    asked: Sequence[Asked],
    shortlists: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> list[LogitRow]:
    """Shortlists of rows on a device, in one copy; each row can be fetched as a whole."""
    logits_TV = logits_TV.float()
    vocab, device = logits_TV.shape[1], logits_TV.device
    hot_T = torch.tensor([one.temperature for one in asked], dtype=torch.float64)
    drawn_T3 = torch.tensor([[one.noisy, _signed(one.params.seed), one.position] for one in asked])
    found = shortlists(logits_TV, hot_T.to(device), drawn_T3.to(device), KEEP)
    return [
        ListedRow(shortlist=Shortlist.of(found_W, vocab, one), fetch=_fetching(logits_V))
        for found_W, logits_V, one in zip(found.cpu().numpy(), logits_TV, asked, strict=True)
    ]


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return seed - (1 << 64 if seed >> 63 else 0)


def _fetching(logits_V: Tensor) -> Callable[[], NDArray[np.float32]]:
    return lambda: host_rows(logits_V)
