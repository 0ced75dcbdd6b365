"""Checkpoint files made byte by byte, right or wrong in one chosen place."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import civetta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
GGML_F32, GGML_F16, GGML_Q8_0, GGML_Q4_K, GGML_I32 = 0, 1, 8, 12, 26


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + u32(kind) + payload


def items(kind: int, count: int, payload: bytes) -> bytes:
    """The payload of an array value."""
    return u32(kind) + u64(count) + payload


def architecture(name: str = "qwen4exp") -> bytes:
    return key("general.architecture", STRING, text(name))


def tensor(
    name: str | bytes, ne: Sequence[int], *, kind: int = GGML_F32, offset: int = 0, rank: int = -1
) -> bytes:
    """A tensor entry; `ne` in ggml order, `rank` may lie."""
    sizes = b"".join(map(u64, ne))
    return text(name) + u32(len(ne) if rank < 0 else rank) + sizes + u32(kind) + u64(offset)


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; the counts may lie. Data is padded to the alignment, as writers do."""
    head = magic + u32(version)
    head += u64(len(tensors) if tensor_count is None else tensor_count)
    head += u64(len(keys) if key_count is None else key_count)
    head += b"".join(keys) + b"".join(tensors)
    if not data:
        return head
    return head + bytes(-len(head) % alignment) + data


def write(path: Path, content: bytes) -> Path:
    """A new file even where one is, since the old one may still be mapped."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return path


def part_keys(number: int, count: int, tensors: int) -> list[bytes]:
    """What says which part of a split model a file is."""
    return [
        key("split.no", U16, struct.pack("<H", number)),
        key("split.count", U16, struct.pack("<H", count)),
        key("split.tensors.count", I32, struct.pack("<i", tensors)),
    ]


def safetensors(entries: Mapping[str, object] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file from header entries, or from a header that is bytes already."""
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return u64(len(header)) + header + data


def entry(dtype: object, shape: object, start: object, stop: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def run_python(code: str) -> str:
    """What a fresh interpreter prints that runs `code` with this civetta."""
    source = str(Path(civetta.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env
    )
    return done.stdout
