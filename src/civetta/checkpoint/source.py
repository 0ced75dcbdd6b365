"""`open_checkpoint`: a path to named tensors, whatever container they are in; bytes stay on disk.

A tensor's bytes are a read-only view of a shared file mapping. Nothing here copies or decodes them.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from civetta.checkpoint.existing import existing
from civetta.checkpoint.gguf_split import model_in_folder, read_gguf
from civetta.checkpoint.safetensors import CONFIG_NAME, read_safetensors_folder
from civetta.checkpoint.tensors import not_found
from civetta.errors import CheckpointMalformed, CheckpointNotFound, TensorMissing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from civetta.checkpoint.tensors import TensorInfo

CheckpointKind = Literal["gguf", "safetensors"]


class Checkpoint:
    """An open checkpoint.

    path: the model file (first part of a split one) or the Hugging Face folder.
    metadata: GGUF keys and values (types: see `GgufHeader`), or for a folder the parsed JSON files
    by file name ("config.json" always).
    tensors: every tensor by its name in the files.
    files: the files with tensors, in order.

    Mappings are made on first use. `close` lets go of them; a view handed out before stays valid,
    since it holds its mapping itself.
    """

    def __init__(
        self,
        *,
        kind: CheckpointKind,
        path: Path,
        metadata: Mapping[str, object],
        tensors: Mapping[str, TensorInfo],
        files: tuple[Path, ...],
    ) -> None:
        self.kind: CheckpointKind = kind
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self.files = files
        self._maps: dict[Path, mmap.mmap] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({self.kind}, {str(self.path)!r}, {len(self.tensors)} tensors)"

    def bytes_of(self, name: str) -> np.ndarray:
        """Stored bytes of a tensor: read-only uint8 [nbytes], a view of the mapped file.

        Raises TensorMissing when there is no such tensor, CheckpointNotFound or
        CheckpointMalformed when its file has gone or shrunk since it was opened.
        """
        assert not self._closed, "the checkpoint is closed"
        info = self.tensors.get(name)
        if info is None:
            raise TensorMissing(f"{self.path} has no tensor {name!r}.")
        if info.nbytes == 0:
            return np.empty(0, np.uint8)
        data = self._map(info.path)
        if info.offset + info.nbytes > len(data):
            raise CheckpointMalformed(
                f"{info.path} has become shorter since it was opened: the data of {name!r} is"
                " gone. Download it again and restart."
            )
        return np.frombuffer(data, np.uint8, info.nbytes, info.offset)

    def place(self, address: int, nbytes: int) -> tuple[Path, int] | None:
        """The file that is mapped at an address in memory, and the byte of it that lies there.

        None unless all `nbytes` from there on are one mapped file's.
        """
        for path, data in self._maps.items():
            start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
            if start <= address and address + nbytes <= start + len(data):
                return path, address - start
        return None

    def close(self) -> None:
        """Let go of all files; may be called twice."""
        self._closed = True
        self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise not_found(path, error) from error
        return self._maps[path]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a GGUF file (any part of a split one), a folder of GGUF files, or a Hugging Face folder.

    A folder with config.json and .safetensors files is a Hugging Face model; of a GGUF folder the
    one file that is a model is taken, sidecars left aside. Raises CheckpointNotFound,
    CheckpointMalformed, TensorTypeUnknown.
    """
    path = existing(path)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".safetensors":
        raise CheckpointNotFound(
            f"{path} is a part of a model without its configuration; give the folder {path.parent},"
            " which must have config.json."
        )
    model = read_gguf(path)
    return Checkpoint(
        kind="gguf",
        path=model.files[0],
        metadata=model.metadata,
        tensors=model.tensors,
        files=model.files,
    )


def _open_folder(folder: Path) -> Checkpoint:
    has_config = (folder / CONFIG_NAME).exists()
    has_weights = next(folder.glob("*.safetensors"), None) is not None
    if not (has_config and has_weights):
        gguf = model_in_folder(folder)
        if gguf is not None:
            return open_checkpoint(gguf)
    if not has_config:
        what = f"no {CONFIG_NAME}" if has_weights else "neither a .gguf file nor a config.json"
        raise CheckpointNotFound(f"{folder} has {what}; give the folder or file of a model.")
    model = read_safetensors_folder(folder)
    return Checkpoint(
        kind="safetensors",
        path=folder,
        metadata=model.metadata,
        tensors=model.tensors,
        files=model.files,
    )
