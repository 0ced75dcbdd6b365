"""safetensors headers: one file, or a Hugging Face folder with or without a shard index.

A file is 8 bytes of header length (little-endian), that many bytes of JSON, then tensor data that
the entries cover without a hole or an overlap. No tensor data is read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NoReturn

from civetta.checkpoint.formats import by_safetensors_dtype
from civetta.checkpoint.tensors import TensorInfo, check_extents, not_found, refuse_pointer
from civetta.errors import CheckpointMalformed, CheckpointNotFound, TensorTypeUnknown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
# What a model says about itself besides its configuration; tokenizers are read by civetta.chat.
SIDE_FILES = (
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "hf_quant_config.json",
)
MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 64_000_000
MAX_DIMS = 8
MAX_NAME_CHARS = 1024

_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<parts>\d{5})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsModel:
    """A Hugging Face folder: parsed JSON files by file name, tensors of all shards, shard files."""

    files: tuple[Path, ...]
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]


def read_safetensors_folder(folder: Path) -> SafetensorsModel:
    """Read config, side files and the headers of all shards of a Hugging Face folder.

    Raises CheckpointNotFound for a missing config or shard, CheckpointMalformed for bytes, JSON or
    an index that contradict the format or each other, TensorTypeUnknown for an unknown dtype.
    """
    metadata: dict[str, object] = {CONFIG_NAME: read_json_object(folder / CONFIG_NAME)}
    for name in SIDE_FILES:
        if (folder / name).exists():
            metadata[name] = read_json_object(folder / name)
    has_index = (folder / INDEX_NAME).exists()
    weight_map = _read_weight_map(folder / INDEX_NAME) if has_index else None
    files = _indexed_files(folder, weight_map) if weight_map is not None else _loose_files(folder)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_safetensors_header(file):
            if info.name in tensors:
                raise CheckpointMalformed(
                    f"Tensor {info.name!r} is both in {tensors[info.name].path} and in {file};"
                    " keep one of them."
                )
            tensors[info.name] = info
    if weight_map is not None:
        _compare_with_index(folder, weight_map, tensors)
    return SafetensorsModel(files=files, metadata=metadata, tensors=tensors)


def read_safetensors_header(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of one file in file order; raises as `read_safetensors_folder`."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            first = file.read(8)
            refuse_pointer(path, first)
            header_bytes = int.from_bytes(first, "little")
            if len(first) < 8 or header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointMalformed(
                    f"{path} is no whole safetensors file: it claims a header of {header_bytes}"
                    f" bytes and has {file_bytes} bytes in all; download it again."
                )
            raw = file.read(header_bytes)
    except OSError as error:
        raise not_found(path, error) from error
    header = _parse_object(raw, path)
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    infos = [_tensor(name, entry, path, data_start) for name, entry in header.items()]
    infos.sort(key=lambda t: (t.offset, t.offset + t.nbytes))
    check_extents(infos, path, file_bytes)
    _refuse_holes(infos, path, data_start, file_bytes)
    return tuple(infos)


def read_json_object(path: Path) -> dict[str, object]:
    """A JSON file whose top level is an object; raises CheckpointNotFound, CheckpointMalformed."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise not_found(path, error) from error
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointMalformed(
            f"{path} is larger than {MAX_JSON_BYTES} bytes; no model needs it."
        )
    return _parse_object(raw, path)


def _parse_object(raw: bytes, path: Path) -> dict[str, object]:
    try:
        # UnicodeDecodeError and JSONDecodeError are ValueErrors, as is an integer of 5000 digits
        parsed = json.loads(raw.decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointMalformed(
            f"The JSON of {path} cannot be read ({reason}); download the file again."
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointMalformed(f"The JSON of {path} is not an object; download the file again.")
    return parsed


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} occurs twice")
    return unique


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor(name: str, entry: object, path: Path, data_start: int) -> TensorInfo:
    """One header entry checked; `data_start` is where the data of the file begins."""

    def refuse(what: str) -> NoReturn:
        raise CheckpointMalformed(f"{path}: tensor {name!r} {what}; download the file again.")

    if not name or len(name) > MAX_NAME_CHARS:
        refuse(f"has a name of {len(name)} characters")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse("has no entry of exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
        refuse(f"has a shape that is no list of at most {MAX_DIMS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        refuse("has data_offsets that are no pair of positions")
    fmt = by_safetensors_dtype(dtype) if isinstance(dtype, str) else None
    if fmt is None:
        raise TensorTypeUnknown(
            f"{path}: tensor {name!r} is stored as {dtype!r}, which civetta cannot decode;"
            " use another release of the model."
        )
    start, stop = offsets
    nbytes = prod(shape) * fmt.block_bytes
    if stop - start != nbytes:
        refuse(f"of shape {shape} and type {dtype} takes {nbytes} bytes, not {start} to {stop}")
    return TensorInfo(
        name=name,
        shape=tuple(shape),
        format=fmt,
        path=path,
        offset=data_start + start,
        nbytes=nbytes,
    )


def _refuse_holes(infos: list[TensorInfo], path: Path, data_start: int, file_bytes: int) -> None:
    """The format lets no byte of data belong to no tensor; `infos` are in file order."""
    end = data_start
    for info in infos:
        if info.offset != end:
            raise CheckpointMalformed(
                f"{path}: {info.offset - end} bytes before tensor {info.name!r} belong to no"
                " tensor; the file is damaged, download it again."
            )
        end += info.nbytes
    if end != file_bytes:
        raise CheckpointMalformed(
            f"{path}: {file_bytes - end} bytes after its last tensor belong to no tensor;"
            " the file is damaged, download it again."
        )


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name to shard file name, as the index says."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointMalformed(f"{path} has no weight_map; download it again.")
    for tensor, shard in weight_map.items():
        # a shard lies beside its index: no separator, no drive, no parent
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\:\x00]+\.safetensors", shard):
            raise CheckpointMalformed(
                f"{path} puts tensor {tensor!r} into {shard!r}, which is not the name of a"
                " .safetensors file beside it; download the index again."
            )
    return weight_map


def _indexed_files(folder: Path, weight_map: Mapping[str, str]) -> tuple[Path, ...]:
    listed = sorted(set(weight_map.values()))
    missing = [name for name in listed if not (folder / name).exists()]
    if missing:
        raise CheckpointNotFound(
            f"{folder} lacks {missing[0]}: {len(missing)} of its {len(listed)} shards are not there;"
            " download the shards again."
        )
    surplus = sorted({file.name for file in _weight_files(folder)} - set(listed))
    if surplus:
        raise CheckpointMalformed(
            f"{folder / surplus[0]} is not listed in {INDEX_NAME}; move it out of the folder if it"
            " is not part of the model, or download the index again."
        )
    return tuple(folder / name for name in listed)


def _loose_files(folder: Path) -> tuple[Path, ...]:
    """All .safetensors files of a folder without index; numbered shards must be complete."""
    files = _weight_files(folder)
    if not files:
        raise CheckpointNotFound(f"{folder} has no .safetensors file; download the weights.")
    names = {file.name for file in files}
    for match in filter(None, map(_PART.fullmatch, sorted(names))):
        for part in range(1, int(match["parts"]) + 1):
            wanted = f"{match['stem']}-{part:05}-of-{match['parts']}.safetensors"
            if wanted not in names:
                raise CheckpointNotFound(
                    f"{folder} lacks {wanted}; download all shards into one folder."
                )
    return tuple(files)


def _weight_files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix == ".safetensors")
    except OSError as error:
        raise not_found(folder, error) from error


def _compare_with_index(
    folder: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    index = folder / INDEX_NAME
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointMalformed(
                f"{index} lists tensor {name!r} in {shard}, which does not have it;"
                " download index and shards again."
            )
        if tensors[name].path.name != shard:
            raise CheckpointMalformed(
                f"{index} lists tensor {name!r} in {shard}, but it is in"
                f" {tensors[name].path.name}; download index and shards again."
            )
    for name, info in tensors.items():
        if name not in weight_map:
            raise CheckpointMalformed(
                f"{info.path} has tensor {name!r}, which {INDEX_NAME} does not list;"
                " download index and shards again."
            )
