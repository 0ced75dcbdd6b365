"""`TensorInfo`: where one stored tensor lies, and the checks that every container shares.

Nothing here reads tensor data; positions are bytes from the start of a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from civetta.errors import CheckpointMalformed, CheckpointNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from civetta.checkpoint.formats import QuantFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a checkpoint.

    `shape` is in PyTorch order (last dimension contiguous); () is a scalar. `offset` is absolute in
    `path`, and `nbytes` bytes from there on are the rows one after the other.
    """

    name: str
    shape: tuple[int, ...]
    format: QuantFormat
    path: Path
    offset: int
    nbytes: int

    @property
    def cols(self) -> int:
        """Values a row: the last dimension, 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Rows over all leading dimensions: 1 for a vector or a scalar."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row."""
        return self.format.row_bytes(self.cols)


def tensor_bytes(name: str, shape: tuple[int, ...], fmt: QuantFormat, path: Path) -> int:
    """Stored bytes of a tensor of `shape`.

    Raises CheckpointMalformed when a row is not a whole number of blocks.
    """
    cols = shape[-1] if shape else 1
    try:
        row_bytes = fmt.row_bytes(cols)
    except ValueError as error:
        raise CheckpointMalformed(
            f"{path}: tensor {name!r} has rows of {cols} values, but {fmt.name} is stored in blocks"
            f" of {fmt.block_values}; the file is damaged or was written by a faulty converter."
        ) from error
    return prod(shape[:-1]) * row_bytes


def check_extents(infos: Sequence[TensorInfo], path: Path, file_bytes: int) -> None:
    """Prove that the tensors of one file lie inside it and do not overlap.

    Raises CheckpointMalformed naming the first tensor at fault.
    """
    end, previous = 0, ""
    for info in sorted(infos, key=lambda t: (t.offset, t.offset + t.nbytes)):
        if info.offset + info.nbytes > file_bytes:
            raise CheckpointMalformed(
                f"{path}: the data of tensor {info.name!r} should end at byte"
                f" {info.offset + info.nbytes}, but the file has only {file_bytes} bytes;"
                " it is truncated, download it again."
            )
        if info.offset < end and info.nbytes:
            raise CheckpointMalformed(
                f"{path}: tensors {previous!r} and {info.name!r} overlap; the file is damaged."
            )
        end, previous = max(end, info.offset + info.nbytes), info.name


def not_found(path: Path, error: OSError) -> CheckpointNotFound:
    """The error for a file that cannot be opened or read."""
    reason = error.strerror or "it cannot be read"
    return CheckpointNotFound(f"Cannot open {path}: {reason}. Check the path and its permissions.")


def refuse_pointer(path: Path, first: bytes) -> None:
    """Raise CheckpointMalformed when a file is a Git LFS pointer in place of its content."""
    if first.startswith(b"version https://git-lfs"[: len(first)]) and first:
        raise CheckpointMalformed(
            f"{path} is a Git LFS pointer, not the model; fetch it with `git lfs pull`."
        )
