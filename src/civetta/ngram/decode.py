"""Stored rows to numbers: the one place where rows of the n-gram table are dequantized.

Legend: N different rows, M rows asked for, B bytes a row, C values a row.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from civetta.kernels.dequant.reference import FP8_BLOCK, dequantize_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from civetta.ngram.layout import TableLayout
    from civetta.ngram.store import StoredRows


HOST_ROWS = 1024
"""Up to so many rows in host memory are decoded there: a GPU's launches for them would take longer."""


class RowDecoder:
    """Decodes for `device`. What lies in host memory goes to a GPU through one page-locked buffer."""

    def __init__(self, layout: TableLayout, *, device: torch.device, dtype: torch.dtype) -> None:
        self._layout, self._device, self._dtype = layout, device, dtype
        self._staging: torch.Tensor | None = None
        self._uploaded: torch.cuda.Event | None = None
        shards = layout.fields[0].shards
        same = all(s.scale is shards[0].scale and s.scale_2 is shards[0].scale_2 for s in shards)
        self._rows_a_group = layout.rows if same else layout.rows_a_shard

    def decode(self, *stored: StoredRows) -> torch.Tensor:
        """The rows that were asked for, of one gather after the other, dtype [M, C] on `device`:
        exact float32, then one rounding."""
        data_NB, rows_N, back_M = _joined(stored)
        if data_NB.device.type != "cpu" or len(back_M) > HOST_ROWS:
            data_NB = self._on_device(data_NB)
        group_N = rows_N // self._rows_a_group
        parts = [
            self._decode(data_NB[low:high], rows_N[low:high], int(group_N[low]))
            for low, high in _runs(group_N)
        ]
        rows_NC = torch.cat(parts) if len(parts) != 1 else parts[0]
        return self._on_device(rows_NC.index_select(0, torch.from_numpy(back_M).to(rows_NC.device)))

    def _decode(self, data_NB: torch.Tensor, rows_N: NDArray[np.int64], group: int) -> torch.Tensor:
        layout = self._layout
        shard = layout.fields[0].shards[group]
        scale = shard.scale
        blocks = scale is not None and scale.ndim == 2  # 128x128 values each, model.md A.7
        rows_NC = dequantize_rows(
            data_NB,
            layout.format,
            layout.cols,
            scale=None if blocks else scale,
            scale_2=shard.scale_2,
        )
        if scale is not None and blocks:
            inside_N = torch.from_numpy(rows_N % self._rows_a_group // FP8_BLOCK)
            cols_C = torch.arange(layout.cols) // FP8_BLOCK
            rows_NC = rows_NC * scale.float()[inside_N][:, cols_C].to(rows_NC.device)
        return rows_NC.to(self._dtype)

    def _on_device(self, data: torch.Tensor) -> torch.Tensor:
        if data.device.type != "cpu" or self._device.type == "cpu":  # "cuda" is "cuda:0" as well
            return data
        size = data.nbytes
        if self._uploaded is not None:
            self._uploaded.synchronize()  # the buffer is free when the upload before has ended
        if self._staging is None or self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        staged = self._staging[:size].view(data.dtype).view(data.shape)
        staged.copy_(data)
        on_device = staged.to(self._device, non_blocking=True)
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
        self._uploaded.record()
        return on_device


def _joined(
    stored: Sequence[StoredRows],
) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Several gathers as one: data_NB, rows_N (ascending within a gather), back_M."""
    if len(stored) == 1:
        return stored[0].data_NB, stored[0].rows_N, stored[0].back_M.reshape(-1)
    counts = [len(found.rows_N) for found in stored]
    starts = itertools.accumulate(counts[:-1], initial=0)
    back = [found.back_M.reshape(-1) + start for found, start in zip(stored, starts, strict=True)]
    return (
        torch.cat([found.data_NB for found in stored]),
        np.concatenate([found.rows_N for found in stored]),
        np.concatenate(back),
    )


def _runs(group_N: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Bounds of the runs of equal numbers."""
    cuts = (np.flatnonzero(np.diff(group_N)) + 1).tolist()
    bounds = [0, *cuts, len(group_N)]
    return list(itertools.pairwise(bounds))
