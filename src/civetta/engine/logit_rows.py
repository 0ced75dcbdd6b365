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

    from civetta.decode.shortlist import LogitRow


def host_rows(logits_TV: Tensor) -> NDArray[np.float32]:
    """The rows, float32 [T, V], in the host's memory."""
    rows_TV: NDArray[np.float32] = logits_TV.float().cpu().numpy()
    return rows_TV


def listed_rows(
    logits_TV: Tensor,
    temperatures: Sequence[float],
    shortlists: Callable[[Tensor, Tensor, int], Tensor],
) -> list[LogitRow]:
    """Shortlists of rows on a device, in one copy; each row can be fetched as a whole.

    `temperatures` of the rows' requests; 0, for which no sum is needed, counts as 1.
    """
    logits_TV = logits_TV.float()
    vocab = logits_TV.shape[1]
    hot_T = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64)
    found_TW = shortlists(logits_TV, hot_T.to(logits_TV.device), KEEP).cpu().numpy()
    return [
        ListedRow(shortlist=Shortlist.of(found_W, vocab), fetch=_fetching(logits_V))
        for found_W, logits_V in zip(found_TW, logits_TV, strict=True)
    ]


def _fetching(logits_V: Tensor) -> Callable[[], NDArray[np.float32]]:
    return lambda: host_rows(logits_V)
