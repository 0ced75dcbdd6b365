"""Stored weights from their files to a device: large reads by several threads, beside the packing.

Mapped pages would be read on first touch, a few at a time, and copied twice by one thread on the way
to a device. Here threads read ranges of the files straight into pinned memory, ahead of the part that
is packed, and the device copies from there.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from torch import Tensor

from civetta.checkpoint.tensors import not_found
from civetta.errors import CheckpointMalformed
from civetta.model.stored import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    Place = Callable[[int, int], tuple[Path, int] | None]

PIECE_BYTES = 64 << 20
"""Read at once by one thread."""
PIECES = 12
"""Pieces in pinned memory: what is read ahead of the device."""
THREADS = 8

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes of a file from `offset`, a multiple of a page, that are mapped at `address`."""

    path: Path
    offset: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    span: Span
    at: int
    nbytes: int


class Uploader:
    """Hands out parts of a network in order, their tensors on `device`; a context manager.

    `place(address, nbytes)` tells which file is mapped there and from which byte on, None for memory
    that is no file's: such tensors are copied as they are. Raises CheckpointNotFound and
    CheckpointMalformed for files that cannot be read or have shrunk.
    """

    def __init__(self, parts: Sequence[Any], device: torch.device, place: Place) -> None:
        self._device = device
        self._parts = deque((part, spans_of(tensors_of(part), place)) for part in parts)
        pieces = [piece for _, spans in self._parts for span in spans for piece in _cut(span)]
        self._todo = iter(pieces)
        self._files = {piece.span.path: -1 for piece in pieces}
        self._coming: deque[tuple[Tensor, Future[Tensor]]] = deque()
        self._buffers = min(PIECES, len(pieces))
        self._threads = ThreadPoolExecutor(THREADS, "civetta-load")
        self.done_bytes = 0

    def __enter__(self) -> Self:
        for path in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                raise not_found(path, error) from error
        pinned = self._device.type == "cuda"
        for _ in range(self._buffers):
            self._ask(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned), None)
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            if file >= 0:
                os.close(file)

    def take(self) -> Any:
        """The next part, on the device. Its memory is the caller's alone."""
        part, spans = self._parts.popleft()
        held = [(span, self._bring(span)) for span in spans]
        return moved(part, lambda x: _found(x, held, self._device))

    def wait(self, read: Future[Tensor]) -> Tensor:
        """Bytes of a piece once they are read."""
        return read.result()

    def copy(self, read: Tensor, to: Tensor) -> None:
        """Start the copy of a piece to the device."""
        to.copy_(read, non_blocking=True)

    def _bring(self, span: Span) -> Tensor:
        whole = torch.empty(span.nbytes, dtype=torch.uint8, device=self._device)
        for piece in _cut(span):
            buffer, coming = self._coming.popleft()
            self.copy(self.wait(coming), whole[piece.at : piece.at + piece.nbytes])
            self.done_bytes += piece.nbytes
            copied = None
            if self._device.type == "cuda":
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            self._ask(buffer, copied)
        return whole

    def _ask(self, buffer: Tensor, copied: torch.cuda.Event | None) -> None:
        """Have the next piece read into a buffer, once what it held is copied."""
        piece = next(self._todo, None)
        if piece is not None:
            self._coming.append((buffer, self._threads.submit(self._read, piece, buffer, copied)))

    def _read(self, piece: _Piece, buffer: Tensor, copied: torch.cuda.Event | None) -> Tensor:
        if copied is not None:
            copied.synchronize()
        into, path = buffer[: piece.nbytes], piece.span.path
        view, done = memoryview(cast("Any", into.numpy())), 0
        while done < piece.nbytes:
            at = piece.span.offset + piece.at + done
            try:
                got = os.preadv(self._files[path], [view[done:]], at)
            except OSError as error:
                raise not_found(path, error) from error
            if not got:
                raise CheckpointMalformed(
                    f"{path} has become shorter since it was opened. Download it again and restart."
                )
            done += got
        return into


def spans_of(tensors: Iterable[Tensor], place: Place) -> tuple[Span, ...]:
    """What to read for tensors: ranges of whole pages, those that touch joined, in file order."""
    found = []
    for x in tensors:
        address, nbytes = x.data_ptr(), _span_bytes(x)
        where = place(address, nbytes) if nbytes else None
        if where is not None:
            path, offset = where
            before = offset % mmap.PAGESIZE
            found.append(
                Span(
                    path=path,
                    offset=offset - before,
                    address=address - before,
                    nbytes=nbytes + before,
                )
            )
    found.sort(key=lambda span: (str(span.path), span.offset))
    joined: list[Span] = []
    for span in found:
        last = joined[-1] if joined else None
        if last is None or last.path != span.path or span.offset > last.offset + last.nbytes:
            joined.append(span)
            continue
        nbytes = max(last.nbytes, span.offset + span.nbytes - last.offset)
        joined[-1] = replace(last, nbytes=nbytes)
    return tuple(joined)


def moved(part: Part, move: Callable[[Tensor], Tensor]) -> Part:
    """A dataclass of weights with every tensor in it replaced; what has none stays the same object."""
    if isinstance(part, Tensor):
        return cast("Part", move(part))
    if isinstance(part, tuple):
        return cast("Part", tuple(moved(one, move) for one in part))
    if not is_dataclass(part):
        return part
    new = {}
    for field in fields(part):
        old = getattr(part, field.name)
        value = moved(old, move)
        if value is not old and not _same(value, old):
            new[field.name] = value
    return replace(cast("Any", part), **new) if new else part


def _same(new: object, old: object) -> bool:
    """Whether two tuples hold the same objects."""
    if not (isinstance(new, tuple) and isinstance(old, tuple)):
        return False
    return all(a is b for a, b in zip(new, old, strict=True))


def _cut(span: Span) -> list[_Piece]:
    return [
        _Piece(span=span, at=at, nbytes=min(PIECE_BYTES, span.nbytes - at))
        for at in range(0, span.nbytes, PIECE_BYTES)
    ]


def _found(x: Tensor, held: Sequence[tuple[Span, Tensor]], device: torch.device) -> Tensor:
    """A tensor in the bytes that were brought, or a copy of one that is no file's."""
    address = x.data_ptr()
    for span, whole in held:
        at = address - span.address
        if x.numel() and 0 <= at < span.nbytes:
            rest = whole[at : at + _span_bytes(x)].view(x.dtype)
            return rest.as_strided(x.shape, x.stride(), rest.storage_offset())
    return x.to(device)


def _span_bytes(x: Tensor) -> int:
    """From the first byte to the last; rows may lie apart."""
    if not x.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize
