"""A GGUF model as a whole: its split parts merged, its role told, and the right file of a folder.

A split model is `NAME-00001-of-0000N.gguf` and so on; part 1 has the metadata, any part leads to
the others, and each says which part of how many it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from civetta.checkpoint.gguf import GgufHeader, read_gguf_header
from civetta.checkpoint.tensors import not_found
from civetta.errors import CheckpointMalformed, CheckpointNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from civetta.checkpoint.tensors import TensorInfo

GgufRole = Literal["model", "mtp", "mmproj"]

_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
MAX_PARTS = 999


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """All parts of one GGUF model: metadata of the first part, tensors of all in file order."""

    files: tuple[Path, ...]
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]

    @property
    def role(self) -> GgufRole:
        """What the file is for."""
        return gguf_role(self.metadata, self.tensors)


def read_gguf(path: Path) -> GgufModel:
    """Read the headers of the model that `path` is, or is a part of.

    Raises what `read_gguf_header` raises, CheckpointNotFound for a missing part, and
    CheckpointMalformed for parts that do not belong together.
    """
    files = part_paths(path)
    headers = [read_gguf_header(file) for file in files]
    for index, header in enumerate(headers):
        _check_part(header, index, headers[0], len(files))
    tensors: dict[str, TensorInfo] = {}
    for info in (info for header in headers for info in header.tensors):
        if info.name in tensors:
            raise CheckpointMalformed(
                f"Tensor {info.name!r} is both in {tensors[info.name].path} and in {info.path};"
                " the parts are not of one model."
            )
        tensors[info.name] = info
    metadata = headers[0].metadata
    claimed = _integer(headers[0], "split.tensors.count", len(tensors))
    if len(files) > 1 and claimed != len(tensors):
        raise CheckpointMalformed(
            f"{files[0]} announces {claimed} tensors, but its {len(files)} parts have"
            f" {len(tensors)}; download the parts again."
        )
    return GgufModel(files=files, metadata=metadata, tensors=tensors)


def part_paths(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` belongs to, in order; just `path` when it is not split.

    Raises CheckpointNotFound when one is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    parts = int(match["parts"])
    if not 1 <= int(match["part"]) <= parts <= MAX_PARTS:
        raise CheckpointMalformed(
            f"{path.name} is not a possible part of {parts}; give the file its original name."
        )
    files = tuple(
        path.with_name(f"{match['stem']}-{part:05}-of-{match['parts']}.gguf")
        for part in range(1, parts + 1)
    )
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointNotFound(
            f"{path.parent} lacks {missing[0]}" + _and_more(missing) + f", {len(missing)} of"
            f" {parts} parts of the model; download all parts into one folder."
        )
    return files


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_part(header: GgufHeader, index: int, first: GgufHeader, parts: int) -> None:
    """Part `index` of `parts` must say that it is, and be of the same architecture as part 0."""
    count = _integer(header, "split.count", 1)
    number = _integer(header, "split.no", 0)
    if count in (0, 1) and parts == 1:
        return
    if count != parts:
        raise CheckpointMalformed(
            f"{header.path} says that it is one of {count} parts, but its name says {parts};"
            " give the parts their original names NAME-00001-of-0000N.gguf."
        )
    if number != index:
        raise CheckpointMalformed(
            f"{header.path} is named part {index + 1} but says that it is part {number + 1};"
            " give the parts their original names."
        )
    own, whole = _architecture(header.metadata), _architecture(first.metadata)
    if own not in (None, whole):
        raise CheckpointMalformed(
            f"{header.path} is of architecture {own!r}, part 1 of {whole!r};"
            " the parts are not of one model."
        )


def _integer(header: GgufHeader, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointMalformed(f"{header.path}: {key} is not an integer; the file is damaged.")
    return value


def _architecture(metadata: Mapping[str, object]) -> str | None:
    value = metadata.get("general.architecture")
    return value if isinstance(value, str) else None


def gguf_role(metadata: Mapping[str, object], tensors: Iterable[str]) -> GgufRole:
    """What a GGUF file is for, from its own words (model.md C.7, C.8).

    "mmproj": architecture `clip`. "mtp": it predicts next tokens and has blocks of the head alone.
    "model": all else, a trunk with a head in the same file as well.
    """
    if _architecture(metadata) == "clip":
        return "mmproj"
    heads = _arch_value(metadata, "nextn_predict_layers")
    blocks = _arch_value(metadata, "block_count")
    if not isinstance(heads, int) or not isinstance(blocks, int) or heads < 1:
        return "model"
    numbers = {int(match[1]) for match in map(_BLOCK.match, tensors) if match}
    return "mtp" if numbers and min(numbers) >= blocks - heads else "model"


def shares_target_tensors(metadata: Mapping[str, object]) -> bool:
    """Whether an MTP file borrows embedding and output from its target model (model.md C.7)."""
    return _arch_value(metadata, "nextn_shared_target_tensors") is True


def _arch_value(metadata: Mapping[str, object], key: str) -> object:
    return metadata.get(f"{_architecture(metadata)}.{key}")


def model_in_folder(folder: Path) -> Path | None:
    """The GGUF model of a folder (first part of a split one), sidecars left aside; None if none.

    Headers are read when several files could be it. Raises CheckpointNotFound when the folder has
    several models, or sidecars only.
    """
    candidates = _first_files(folder)
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    models = [file for file in candidates if read_gguf(file).role == "model"]
    if len(models) == 1:
        return models[0]
    names = ", ".join(file.name for file in models or candidates)
    raise CheckpointNotFound(
        f"{folder} has {'several models' if models else 'sidecars but no model'}: {names}."
        " Give the path of the model file itself."
    )


def _first_files(folder: Path) -> list[Path]:
    """GGUF files of a folder, one a split model (its first part present or not), sorted."""
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".gguf")
    except OSError as error:
        raise not_found(folder, error) from error
    seen: set[str] = set()
    chosen = []
    for file in files:
        match = _PART.fullmatch(file.name)
        key = f"{match['stem']}/{match['parts']}" if match else file.name
        if key not in seen:
            seen.add(key)
            chosen.append(file)
    return chosen
