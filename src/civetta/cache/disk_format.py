"""The bytes of an entry file: one state, and the names of the runs of pages it goes with.

    8 bytes   magic "civcache"
    4 bytes   format version, little-endian
    4 bytes   length of the head, little-endian
    head      JSON, see `Head`
    32 bytes  BLAKE2b of everything before
    blobs     token ids, rope positions, small state; each with its digest in the head

A run holds up to RUN_PAGES consecutive pages as `PagePool.read` gives them; its file has no frame,
its name is the BLAKE2b of its bytes. docs/cache-format.md says the same for readers of files.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import msgspec
import torch

from civetta.cache.keys import DIGEST_BYTES
from civetta.cache.protocol import ImageMark
from civetta.state.snapshot import SmallState

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

FORMAT_VERSION = 1
MAGIC = b"civcache"
RUN_PAGES = 16
MAX_HEAD_BYTES = 1 << 26
_FRAME = struct.Struct("<8sII")
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
           "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
IDS, ROPE = "ids", "rope"


class BadEntry(Exception):
    """Bytes that are not what an entry or a run has to be; the message says what is wrong."""


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor behind the head."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive pages in one file."""

    digest: str
    pages: int
    nbytes: int


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an entry says of itself. `model`: the fingerprint it belongs to, hexadecimal."""

    model: str
    tokens: int
    rewindable: int
    page_tokens: int
    page_bytes: int
    images: tuple[tuple[int, str], ...]
    numbers: dict[str, int]
    blobs: tuple[Blob, ...]
    runs: tuple[Run, ...]

    @property
    def marks(self) -> tuple[ImageMark, ...]:
        """The images, as prompts have them."""
        return tuple(ImageMark(position=at, digest=bytes.fromhex(d)) for at, d in self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryHead:
    """A checked head, and where the blobs begin in the file."""

    head: Head
    body_start: int

    @property
    def file_bytes(self) -> int:
        """Size that the whole file has to have."""
        return self.body_start + sum(blob.nbytes for blob in self.head.blobs)


def digest_of(data: bytes | memoryview) -> str:
    """BLAKE2b-256, hexadecimal."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def encode_entry(
    small: SmallState,
    runs: Sequence[Run],
    *,
    model: str,
    images: Sequence[ImageMark],
    page_tokens: int,
    page_bytes: int,
) -> list[bytes | memoryview]:
    """The chunks of an entry file, in order."""
    tensors = {
        IDS: torch.from_numpy(small.ids_T),
        ROPE: small.rope_3T.to(torch.int32),
        **small.parts,
    }
    blobs, body = [], []
    for name, tensor in tensors.items():
        data = _bytes(tensor)
        body.append(data)
        blobs.append(
            Blob(
                name=name,
                dtype=_NAMES[tensor.dtype],
                shape=tuple(tensor.shape),
                nbytes=len(data),
                digest=digest_of(data),
            )
        )
    head = msgspec.json.encode(
        Head(
            model=model,
            tokens=small.position,
            rewindable=small.rewindable,
            page_tokens=page_tokens,
            page_bytes=page_bytes,
            images=tuple((i.position, i.digest.hex()) for i in images),
            numbers=dict(small.numbers),
            blobs=tuple(blobs),
            runs=tuple(runs),
        )
    )
    framed = _FRAME.pack(MAGIC, FORMAT_VERSION, len(head)) + head
    return [framed, hashlib.blake2b(framed, digest_size=DIGEST_BYTES).digest(), *body]


def head_bytes(start: bytes) -> int:
    """How many bytes the head takes with its frame and digest; `start`: the file's first 16.

    Raises BadEntry for another kind of file or another version.
    """
    if len(start) < _FRAME.size:
        raise BadEntry("shorter than a head")
    magic, version, length = _FRAME.unpack(start[: _FRAME.size])
    if magic != MAGIC:
        raise BadEntry("not an entry of this cache")
    if version != FORMAT_VERSION:
        raise BadEntry(f"format version {version}, this version reads {FORMAT_VERSION}")
    if length > MAX_HEAD_BYTES:
        raise BadEntry("a head of impossible length")
    return int(_FRAME.size + length + DIGEST_BYTES)


def decode_head(data: bytes) -> EntryHead:
    """Check a head that `head_bytes` measured. Raises BadEntry."""
    body_start = head_bytes(data)
    framed, digest = data[: body_start - DIGEST_BYTES], data[body_start - DIGEST_BYTES : body_start]
    if hashlib.blake2b(framed, digest_size=DIGEST_BYTES).digest() != digest:
        raise BadEntry("the checksum of its head does not match")
    try:
        head = msgspec.json.decode(framed[_FRAME.size :], type=Head)
    except msgspec.DecodeError as error:
        raise BadEntry(f"a head that cannot be read: {error}") from error
    names = [blob.name for blob in head.blobs]
    if names[:2] != [IDS, ROPE] or len(set(names)) != len(names):
        raise BadEntry("a head without token ids and rope positions")
    if any(not _sized(blob) for blob in head.blobs):
        raise BadEntry("a tensor whose size does not fit its shape")
    if sum(run.pages for run in head.runs) != -(-head.tokens // head.page_tokens):
        raise BadEntry("pages that do not match its tokens")
    return EntryHead(head=head, body_start=body_start)


def decode_ids(blob: Blob, data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Token ids from their blob. Raises BadEntry."""
    return decode_blob(blob, data).numpy()


def decode_blob(blob: Blob, data: bytes | memoryview) -> torch.Tensor:
    """A tensor from its bytes. Raises BadEntry when they are not the ones that were written."""
    if len(data) != blob.nbytes or digest_of(data) != blob.digest:
        raise BadEntry(f"the checksum of {blob.name} does not match")
    if not data:
        return torch.zeros(blob.shape, dtype=_DTYPES[blob.dtype])
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.view(_DTYPES[blob.dtype]).view(blob.shape)


def decode_small(entry: EntryHead, body: bytes) -> SmallState:
    """The small state from everything behind the head. Raises BadEntry."""
    head, view, start = entry.head, memoryview(body), 0
    tensors = {}
    for blob in head.blobs:
        tensors[blob.name] = decode_blob(blob, view[start : start + blob.nbytes])
        start += blob.nbytes
    if start != len(body):
        raise BadEntry("bytes behind its end")
    return SmallState(
        ids_T=tensors.pop(IDS).numpy(),
        rope_3T=tensors.pop(ROPE).to(torch.int64),
        numbers=head.numbers,
        parts=tensors,
        rewindable=head.rewindable,
    )


def _sized(blob: Blob) -> bool:
    dtype = _DTYPES.get(blob.dtype)
    return dtype is not None and prod(blob.shape) * dtype.itemsize == blob.nbytes


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    if not flat.numel():
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data.cast("B")
