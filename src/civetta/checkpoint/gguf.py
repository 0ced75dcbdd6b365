"""GGUF headers: a streaming reader that trusts no length and touches no tensor data.

Versions 2 and 3, little-endian. Every length is compared with what is left of the file before
anything of that size is made, and counts have ceilings besides, because a sparse file can be huge
and empty. Long arrays stay in the file: numbers become read-only numpy views of the mapping,
strings a `StringArray` that decodes an element when it is asked for.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, overload

import numpy as np

from civetta.checkpoint.formats import by_ggml_type
from civetta.checkpoint.tensors import (
    TensorInfo,
    check_extents,
    not_found,
    refuse_pointer,
    tensor_bytes,
)
from civetta.errors import CheckpointMalformed, TensorTypeUnknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Ceilings far above any real file (1224 tensors, about 60 keys, 248,320 tokens and 247,587 merges).
MAX_TENSORS = 65_536
MAX_KEYS = 65_536
MAX_NAME_BYTES = 1024  # names end up in messages
MAX_STRING_BYTES = 1 << 26
MAX_STRING_ARRAY_BYTES = 1 << 28
MAX_ARRAY_ITEMS = 1 << 22  # in all arrays of a header together
NESTED_ITEM_WEIGHT = 64  # an array within an array is an object of its own, unlike a number
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_ARRAY_DTYPES: Mapping[int, str] = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one-letter name, type, smallest value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # length, one-letter name, rank, type, offset


class StringArray(Sequence[str]):
    """Strings of a GGUF array, decoded from the mapped file when asked for.

    An element that is not UTF-8 raises CheckpointMalformed on access.
    """

    __slots__ = ("_data", "_key", "_path", "_starts")

    def __init__(self, data: mmap.mmap, starts: array[int], key: str, path: Path) -> None:
        self._data = data
        self._starts = starts  # of each length field, then the end of the array
        self._key = key
        self._path = path

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._decode(i) for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # negative indices and IndexError as of any sequence
        return self._decode(position)

    def __iter__(self) -> Iterator[str]:
        return map(self._decode, range(len(self)))

    def __repr__(self) -> str:
        return f"StringArray({self._key!r}, {len(self)} strings)"

    def _decode(self, index: int) -> str:
        raw = self._data[self._starts[index] + 8 : self._starts[index + 1]]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointMalformed(
                f"{self._path}: element {index} of {self._key!r} is not UTF-8;"
                " the file is damaged or was written by a faulty converter."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What one GGUF file says about itself.

    `metadata` values are int, float, bool, str, read-only numpy vectors (arrays of numbers; bool
    arrays have dtype bool), StringArray, or tuples of these (nested arrays). Tensors are in file
    order.
    """

    path: Path
    version: int
    metadata: Mapping[str, object]
    tensors: tuple[TensorInfo, ...]
    file_bytes: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of one GGUF file.

    Raises CheckpointNotFound when it cannot be opened, CheckpointMalformed when its bytes
    contradict the format, TensorTypeUnknown when a tensor is of a type civetta cannot decode.
    """
    try:
        with path.open("rb") as file:
            first = file.read(24)
            if len(first) == 24 and first[:4] == MAGIC:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            else:
                _refuse_start(path, first)
    except OSError as error:
        raise not_found(path, error) from error
    return _HeaderReader(data, path).read()


def _refuse_start(path: Path, first: bytes) -> NoReturn:
    refuse_pointer(path, first)
    if first[:4] == MAGIC:
        raise CheckpointMalformed(f"{path}: the file ends inside its header; download it again.")
    raise CheckpointMalformed(
        f"{path} is not a GGUF file: it begins with {first[:4]!r}, not {MAGIC!r}."
    )


class _HeaderReader:
    """A position in one mapped file, moved forward by each `read_*`."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.end = len(data)
        self.position = len(MAGIC)
        self.items_left = MAX_ARRAY_ITEMS

    def read(self) -> GgufHeader:
        version = self.read_version()
        tensor_count = self.read_count("tensors", MAX_TENSORS, _MIN_TENSOR_BYTES)
        key_count = self.read_count("metadata keys", MAX_KEYS, _MIN_KEY_BYTES)
        metadata: dict[str, object] = {}
        for _ in range(key_count):
            key = self.read_name("a metadata key")
            if key in metadata:
                self.refuse(f"metadata key {key!r} occurs twice")
            metadata[key] = self.read_value(key, self.read_number(_U32, f"the type of {key!r}"))
        tensors = self.read_tensors(tensor_count, self.alignment(metadata))
        check_extents(tensors, self.path, self.end)
        return GgufHeader(
            path=self.path,
            version=version,
            metadata=metadata,
            tensors=tensors,
            file_bytes=self.end,
        )

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointMalformed(f"{self.path}: {what}; the file is damaged, download it again.")

    def skip(self, size: int, what: str) -> int:
        """Start of the next `size` bytes, which are then behind us."""
        start = self.position
        if size > self.end - start:
            self.refuse(
                f"{what} needs {size} bytes at byte {start}, but the file has {self.end} bytes"
            )
        self.position = start + size
        return start

    def read_number(self, kind: struct.Struct, what: str) -> int:
        value: int = kind.unpack_from(self.data, self.skip(kind.size, what))[0]
        return value

    def read_version(self) -> int:
        version = self.read_number(_U32, "the version")
        if version in SUPPORTED_VERSIONS:
            return version
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *SUPPORTED_VERSIONS):
            raise CheckpointMalformed(
                f"{self.path} is a big-endian GGUF file, which civetta does not read;"
                " use the little-endian file of the same model."
            )
        raise CheckpointMalformed(
            f"{self.path} is GGUF version {version}; civetta reads versions 2 and 3."
            " Convert the model again with a current converter."
        )

    def read_count(self, what: str, ceiling: int, smallest: int) -> int:
        count = self.read_number(_U64, f"the number of {what}")
        if count > ceiling or count * smallest > self.end - self.position:
            self.refuse(f"it claims {count} {what}, more than it can hold")
        return count

    def read_text(self, what: str, ceiling: int) -> str:
        size = self.read_number(_U64, f"the length of {what}")
        if size > ceiling:
            self.refuse(f"{what} claims a length of {size} bytes")
        start = self.skip(size, what)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} at byte {start} is not UTF-8")

    def read_name(self, what: str) -> str:
        name = self.read_text(what, MAX_NAME_BYTES)
        if not name:
            self.refuse(f"{what} before byte {self.position} is empty")
        return name

    def read_value(self, key: str, kind: int) -> object:
        if kind == _STRING:
            return self.read_text(f"the value of {key!r}", MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self.read_array(key, MAX_ARRAY_DEPTH)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            self.refuse(f"metadata key {key!r} has the unknown value type {kind}")
        value = self.read_number(scalar, f"the value of {key!r}")
        if kind != _BOOL:
            return value
        if value > 1:
            self.refuse(f"metadata key {key!r} is a boolean of value {value}")
        return bool(value)

    def read_array(self, key: str, depth: int) -> object:
        what = f"the array {key!r}"
        kind = self.read_number(_U32, what)
        count = self.read_number(_U64, what)
        weight = count * NESTED_ITEM_WEIGHT if kind == _ARRAY else count
        if weight > self.items_left:
            self.refuse(f"{what} claims {count} items, more than a model has")
        self.items_left -= weight
        if kind == _STRING:
            return self.read_strings(key, count)
        if kind == _ARRAY:
            if depth == 1:
                self.refuse(f"{what} nests deeper than {MAX_ARRAY_DEPTH} levels")
            return tuple(self.read_array(key, depth - 1) for _ in range(count))
        if kind not in _ARRAY_DTYPES:
            self.refuse(f"{what} has items of the unknown type {kind}")
        return self.read_numbers(key, kind, count)

    def read_numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_ARRAY_DTYPES[kind])
        start = self.skip(count * dtype.itemsize, f"the array {key!r}")
        values = np.frombuffer(self.data, dtype, count, start) if count else np.empty(0, dtype)
        if kind != _BOOL:
            return values
        if count and values.max() > 1:
            self.refuse(f"the array {key!r} has booleans that are neither 0 nor 1")
        return values.view(np.bool_)

    def read_strings(self, key: str, count: int) -> StringArray:
        # The hot loop of a header: half a million strings, so no method call an element.
        data, unpack, position = self.data, _U64.unpack_from, self.position
        last = min(self.end, position + MAX_STRING_ARRAY_BYTES) - _U64.size
        starts = array("Q")
        append = starts.append
        for _ in range(count):
            if position > last:
                break
            append(position)
            position += 8 + unpack(data, position)[0]
        if len(starts) < count or position > last + _U64.size:
            self.refuse(f"string {len(starts) - 1} of the array {key!r} does not end in the file")
        append(position)
        self.position = position
        return StringArray(data, starts, key, self.path)

    def alignment(self, metadata: Mapping[str, object]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or isinstance(value, bool):
            self.refuse("general.alignment is not an integer")
        if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            self.refuse(f"general.alignment is {value}, which is no power of two up to 2^20")
        return value

    def read_tensors(self, count: int, alignment: int) -> tuple[TensorInfo, ...]:
        found: dict[str, TensorInfo] = {}
        for _ in range(count):
            info = self.read_tensor(alignment)
            if info.name in found:
                self.refuse(f"tensor {info.name!r} occurs twice")
            found[info.name] = info
        data_start = -(-self.position // alignment) * alignment
        return tuple(
            TensorInfo(
                name=t.name,
                shape=t.shape,
                format=t.format,
                path=t.path,
                offset=data_start + t.offset,
                nbytes=t.nbytes,
            )
            for t in found.values()
        )

    def read_tensor(self, alignment: int) -> TensorInfo:
        """One entry; its offset still counts from the start of the data."""
        name = self.read_name("a tensor name")
        what = f"tensor {name!r}"
        rank = self.read_number(_U32, what)
        if rank > MAX_DIMS:
            self.refuse(f"{what} has {rank} dimensions, more than {MAX_DIMS}")
        ne = [self.read_number(_U64, what) for _ in range(rank)]
        type_id = self.read_number(_U32, what)
        offset = self.read_number(_U64, what)
        fmt = by_ggml_type(type_id)
        if fmt is None:
            raise TensorTypeUnknown(
                f"{self.path}: {what} is stored as ggml type {type_id}, which civetta cannot"
                " decode; use another quantization of the model."
            )
        if 0 in ne:
            self.refuse(f"{what} has a dimension of 0")
        if offset % alignment:
            self.refuse(f"{what} starts at {offset}, no multiple of the alignment {alignment}")
        shape = tuple(reversed(ne))  # ggml counts the contiguous dimension first
        nbytes = tensor_bytes(name, shape, fmt, self.path)
        return TensorInfo(
            name=name, shape=shape, format=fmt, path=self.path, offset=offset, nbytes=nbytes
        )
