"""Rows of the n-gram table read through memory maps: the placement that needs no set-up.

The table stays in its file and in its format (model.md A.3, C.5); a gather copies only the rows it
names and dequantizes those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from civetta.kernels.dequant.reference import dequantize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from civetta.checkpoint.quant import QuantTensor


class MappedRows:
    """A table of one or more equal shards, in row order; rows [rows, row_values]."""

    def __init__(self, shards: Sequence[QuantTensor | Tensor]) -> None:
        self._shards = tuple(shards)
        self._rows_a_shard = int(shards[0].shape[0])

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        return sum(int(shard.shape[0]) for shard in self._shards)

    def gather(self, ids_TH: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        """Concatenated rows of each token, [T, heads * row_values], in head order."""
        flat = ids_TH.reshape(-1)
        unique, back = np.unique(flat, return_inverse=True)
        shard_of = unique // self._rows_a_shard
        parts = [
            self._read(int(shard), unique[shard_of == shard] - shard * self._rows_a_shard)
            for shard in np.unique(shard_of)
        ]
        rows = torch.cat(parts)[torch.from_numpy(back.reshape(-1))]
        return rows.view(ids_TH.shape[0], -1).to(dtype)

    def _read(self, shard: int, rows: NDArray[np.int64]) -> Tensor:
        table = self._shards[shard]
        where = torch.from_numpy(rows)
        if isinstance(table, Tensor):
            return table.index_select(0, where).float()
        return dequantize(table.take_rows(where))
