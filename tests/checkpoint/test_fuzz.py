"""Damaged checkpoints end in one sentence or open; never in a crash, a hang or a large allocation.

Every test opens through the public door and, when that succeeds, uses all that came out of it.
"""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.handmade import (
    ARRAY,
    BOOL,
    F32,
    F64,
    GGML_F16,
    GGML_Q8_0,
    I32,
    STRING,
    U8,
    U16,
    U32,
    architecture,
    entry,
    gguf,
    items,
    key,
    part_keys,
    safetensors,
    tensor,
    text,
    u32,
    u64,
    write,
)
from civetta.checkpoint.gguf import StringArray
from civetta.checkpoint.gguf_split import gguf_role, shares_target_tensors
from civetta.checkpoint.source import open_checkpoint
from civetta.errors import CivettaError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_PEAK_BYTES = 64 << 20
FUZZ = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EXTREMES = (0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 1)


@pytest.fixture(autouse=True, scope="module")
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def survives(path: Path) -> bool:
    """Whether the checkpoint opens; if so, all of it is read. Only a CivettaError may stop that.

    Memory is measured here, around one opening, since hypothesis itself takes more.
    """
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    opened = opens(path)
    assert tracemalloc.get_traced_memory()[1] - before < MAX_PEAK_BYTES
    return opened


def opens(path: Path) -> bool:
    try:
        with open_checkpoint(path) as checkpoint:
            for value in checkpoint.metadata.values():
                if isinstance(value, StringArray):
                    list(value)
            if checkpoint.kind == "gguf":
                gguf_role(checkpoint.metadata, checkpoint.tensors)
                shares_target_tensors(checkpoint.metadata)
            for name, info in checkpoint.tensors.items():
                assert checkpoint.bytes_of(name).size == info.nbytes == info.rows * info.row_bytes
    except CivettaError:
        return False
    return True


HEADER = gguf(
    [
        architecture(),
        key("general.alignment", U32, u32(32)),
        key("qwen4exp.block_count", U32, u32(49)),
        key("qwen4exp.nextn_predict_layers", U32, u32(1)),
        key("flag", BOOL, b"\1"),
        key("words", ARRAY, items(STRING, 3, text("a") + text("") + text("ß"))),
        key("numbers", ARRAY, items(I32, 2, bytes(8))),
        key("flags", ARRAY, items(BOOL, 2, b"\0\1")),
        key("nested", ARRAY, items(ARRAY, 2, items(U8, 1, b"\7") + items(STRING, 1, text("x")))),
        *part_keys(0, 1, 3),
    ],
    [
        tensor("blk.48.a", [8]),
        tensor("blk.48.b", [32, 2], kind=GGML_Q8_0, offset=32),
        tensor("c", [2, 3, 4], kind=GGML_F16, offset=128),
    ],
)
GGUF_DATA = bytes(-len(HEADER) % 32) + bytes(range(176))


def test_the_undamaged_files_open(tmp_path: Path) -> None:
    assert survives(write(tmp_path / "m.gguf", HEADER + GGUF_DATA))
    assert survives(hf_folder(tmp_path))


def test_gguf_cut_at_every_byte(tmp_path: Path) -> None:
    content = HEADER + GGUF_DATA
    for size in range(len(content)):
        assert not survives(write(tmp_path / "m.gguf", content[:size]))


def test_gguf_with_every_header_byte_changed(tmp_path: Path) -> None:
    opened = 0
    for at in range(len(HEADER)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(HEADER + GGUF_DATA)
            damaged[at] ^= flip
            opened += survives(write(tmp_path / "m.gguf", bytes(damaged)))
    assert opened < 3 * len(HEADER) // 2  # what opens is text and numbers that no check can know


def test_gguf_with_every_header_word_extreme(tmp_path: Path) -> None:
    for at in range(4, len(HEADER) - 7):
        for value in EXTREMES:
            damaged = HEADER[:at] + u64(value) + HEADER[at + 8 :] + GGUF_DATA
            survives(write(tmp_path / "m.gguf", damaged))


words = st.one_of(st.sampled_from(EXTREMES), st.integers(0, 64))
kinds = st.integers(0, 14)
names = st.sampled_from(
    [
        "general.architecture",
        "general.alignment",
        "split.no",
        "split.count",
        "split.tensors.count",
        "qwen4exp.block_count",
        "qwen4exp.nextn_predict_layers",
        "qwen4exp.nextn_shared_target_tensors",
        "k",
        "",
    ]
)
payloads = st.recursive(
    st.binary(max_size=24),
    lambda inner: st.builds(items, kinds, words, inner),
    max_leaves=4,
)
sound_values = st.one_of(
    st.builds(lambda n: (U32, u32(n)), st.integers(0, 1 << 31)),
    st.builds(lambda n: (U16, u32(n)[:2]), st.integers(0, 4)),
    st.builds(lambda s: (STRING, text(s)), st.sampled_from(["clip", "qwen4exp", "3"])),
    st.builds(lambda b: (F64, b), st.binary(min_size=8, max_size=8)),
    st.builds(lambda n: (ARRAY, items(F32, n, bytes(4 * n))), st.integers(0, 5)),
    st.builds(lambda n: (ARRAY, items(STRING, n, text("a") * n)), st.integers(0, 5)),
)
sound_keys = st.builds(lambda name, value: key(name, *value), names, sound_values)
any_keys = st.one_of(sound_keys, st.builds(key, names, kinds, payloads))
any_tensors = st.builds(
    lambda name, ne, kind, offset: tensor(name, ne, kind=kind, offset=offset),
    st.sampled_from(["blk.0.a", "blk.48.b", "blk.99999999999.c", "", "d"]),
    st.lists(words, max_size=5),
    st.integers(0, 42),
    st.sampled_from([0, 32, 64, 96, 1 << 40, (1 << 64) - 32]),
)


@FUZZ
@given(st.lists(any_keys, max_size=4), st.lists(any_tensors, max_size=3), st.integers(0, 300))
def test_gguf_of_random_parts(
    tmp_path: Path, keys: list[bytes], tensors: list[bytes], data: int
) -> None:
    survives(write(tmp_path / "m.gguf", gguf(keys, tensors, bytes(data))))


@FUZZ
@given(st.lists(sound_keys, max_size=6), st.sampled_from(["m", "m-00001-of-00001"]))
def test_gguf_with_keys_of_unexpected_types(tmp_path: Path, keys: list[bytes], name: str) -> None:
    survives(write(tmp_path / f"{name}.gguf", gguf(keys, [tensor("blk.48.a", [8])], bytes(32))))


@FUZZ
@given(st.binary(max_size=200))
def test_gguf_of_random_bytes_behind_the_counts(tmp_path: Path, tail: bytes) -> None:
    survives(write(tmp_path / "m.gguf", gguf(key_count=3, tensor_count=1) + tail))


ENTRIES = {
    "__metadata__": {"format": "pt"},
    "a": entry("F32", [2], 0, 8),
    "b": entry("F8_E4M3", [2, 3], 8, 14),
    "c": entry("I64", [], 14, 22),
}
FILE = safetensors(ENTRIES, bytes(22))
SHARD = "model.safetensors"
INDEX = json.dumps({"weight_map": {"a": SHARD, "b": SHARD, "c": SHARD}}).encode()


def hf_folder(
    root: Path, file: bytes = FILE, index: bytes = INDEX, config: bytes = b'{"a": 1}'
) -> Path:
    folder = root / "hf"
    folder.mkdir(exist_ok=True)
    write(folder / SHARD, file)
    write(folder / "model.safetensors.index.json", index)
    write(folder / "config.json", config)
    return folder


def test_safetensors_cut_at_every_byte(tmp_path: Path) -> None:
    for size in range(len(FILE)):
        assert not survives(hf_folder(tmp_path, FILE[:size]))


def test_safetensors_with_every_header_byte_changed(tmp_path: Path) -> None:
    for at in range(len(FILE) - 22):
        for flip in (0x01, 0x02, 0x10, 0x80, 0xFF):
            damaged = bytearray(FILE)
            damaged[at] ^= flip
            survives(hf_folder(tmp_path, bytes(damaged)))


def test_safetensors_header_length_extreme(tmp_path: Path) -> None:
    for value in EXTREMES:
        assert not survives(hf_folder(tmp_path, u64(value) + FILE[8:]))


@pytest.mark.parametrize("part", ["index", "config"])
def test_json_files_cut_and_changed(tmp_path: Path, part: str) -> None:
    content = {"index": INDEX, "config": b'{"a": [1, {"b": null}]}'}[part]
    for at in range(len(content)):
        assert not survives(hf_folder(tmp_path, **{part: content[:at]}))
        for flip in (0x01, 0x10, 0x80):
            damaged = content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
            survives(hf_folder(tmp_path, **{part: damaged}))


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from([*EXTREMES, -1, 0.5, "F32", "I64", "", SHARD, "../x.safetensors"]),
        st.text("ab/\\.\0é", max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=4
        ),
    ),
    max_leaves=8,
)
sizes = st.lists(st.one_of(st.sampled_from(EXTREMES), st.integers(0, 3)), max_size=3)
entries = st.one_of(
    json_values,
    st.builds(
        entry,
        st.sampled_from(["F32", "U8", "I64", "BF16", "F8_E4M3", "F4"]),
        st.one_of(sizes, json_values),
        st.one_of(words, json_values),
        st.one_of(words, json_values),
    ),
)


@FUZZ
@given(
    st.dictionaries(st.sampled_from(["a", "b", "", "__metadata__"]), entries), st.integers(0, 64)
)
def test_safetensors_of_random_entries(
    tmp_path: Path, header: dict[str, object], data: int
) -> None:
    survives(hf_folder(tmp_path, safetensors(header, bytes(data))))


@FUZZ
@given(json_values, json_values)
def test_random_index_and_config(tmp_path: Path, weight_map: object, config: object) -> None:
    index = json.dumps({"weight_map": weight_map}).encode()
    survives(hf_folder(tmp_path, index=index))
    survives(hf_folder(tmp_path, config=json.dumps(config).encode()))


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"a":[{"b":'])
def test_deep_json(tmp_path: Path, opening: bytes) -> None:
    deep = opening * 50_000
    assert not survives(hf_folder(tmp_path, safetensors(deep)))
    assert not survives(hf_folder(tmp_path, config=deep))
    assert not survives(hf_folder(tmp_path, index=deep))
