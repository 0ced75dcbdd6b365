"""GGUF headers: files of the gguf package, files made by hand, and files that are wrong."""

from __future__ import annotations

import gc
import struct
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from checkpoint.handmade import (
    ARRAY,
    BOOL,
    F32,
    GGML_Q4_K,
    GGML_Q8_0,
    I32,
    STRING,
    U8,
    U32,
    U64,
    architecture,
    items,
    key,
    run_python,
    tensor,
    text,
    u32,
    u64,
    write,
)
from checkpoint.handmade import gguf as gguf_bytes
from civetta.checkpoint.gguf import StringArray
from civetta.checkpoint.source import open_checkpoint
from civetta.errors import (
    CheckpointMalformed,
    CheckpointNotFound,
    TensorMissing,
    TensorTypeUnknown,
)

if TYPE_CHECKING:
    from pathlib import Path

    from civetta.checkpoint.source import Checkpoint

ROWS = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)


def open_bytes(tmp_path: Path, content: bytes) -> Checkpoint:
    return open_checkpoint(write(tmp_path / "m.gguf", content))


@pytest.fixture
def package_file(tmp_path: Path) -> Path:
    """A file by the gguf package with every kind of value and three kinds of tensor."""
    path = tmp_path / "package.gguf"
    out = gguf.GGUFWriter(path, "qwen4exp")
    out.add_uint8("k.u8", 200)
    out.add_int8("k.i8", -100)
    out.add_uint16("k.u16", 60_000)
    out.add_int16("k.i16", -30_000)
    out.add_uint32("k.u32", 4_000_000_000)
    out.add_int32("k.i32", -2_000_000_000)
    out.add_float32("k.f32", 0.5)
    out.add_bool("k.bool", val=True)
    out.add_string("k.text", "grüß dich, 世界")
    out.add_uint64("k.u64", 23_703_573_157_769)
    out.add_int64("k.i64", -(1 << 62))
    out.add_float64("k.f64", 1e300)
    out.add_array("k.ints", [0, 0, 0, 4])
    out.add_array("k.bools", [True, False, True])
    out.add_array("k.texts", ["a", "", "ß世"])
    out.add_array("k.nested", [[1, 2], [3, 4, 5]])
    out.add_tensor("rows", ROWS)
    out.add_tensor("cube", np.arange(24, dtype=np.float16).reshape(2, 3, 4))
    packed = gguf.quants.quantize(ROWS, gguf.GGMLQuantizationType.Q8_0)
    out.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_values_of_the_gguf_package(package_file: Path) -> None:
    metadata = open_checkpoint(package_file).metadata
    scalars = {k: v for k, v in metadata.items() if isinstance(v, int | float | str)}
    assert scalars == {
        "general.architecture": "qwen4exp",
        "k.u8": 200,
        "k.i8": -100,
        "k.u16": 60_000,
        "k.i16": -30_000,
        "k.u32": 4_000_000_000,
        "k.i32": -2_000_000_000,
        "k.f32": 0.5,
        "k.bool": True,
        "k.text": "grüß dich, 世界",
        "k.u64": 23_703_573_157_769,
        "k.i64": -(1 << 62),
        "k.f64": 1e300,
    }
    assert metadata["k.bool"] is True
    assert metadata["k.ints"].tolist() == [0, 0, 0, 4]
    assert metadata["k.bools"].tolist() == [True, False, True]
    assert list(metadata["k.texts"]) == ["a", "", "ß世"]
    assert [part.tolist() for part in metadata["k.nested"]] == [[1, 2], [3, 4, 5]]
    assert not metadata["k.ints"].flags.writeable


def test_tensors_of_the_gguf_package(package_file: Path) -> None:
    checkpoint = open_checkpoint(package_file)
    assert checkpoint.kind == "gguf"
    assert checkpoint.files == (package_file,)
    shapes = {name: (t.shape, t.format.name) for name, t in checkpoint.tensors.items()}
    assert shapes == {
        "rows": ((3, 64), "F32"),
        "cube": ((2, 3, 4), "F16"),
        "packed": ((3, 64), "Q8_0"),
    }
    cube = checkpoint.tensors["cube"]
    assert (cube.rows, cube.cols, cube.row_bytes, cube.nbytes) == (6, 4, 8, 48)
    assert np.array_equal(checkpoint.bytes_of("rows").view("<f4").reshape(3, 64), ROWS)
    packed = gguf.quants.quantize(ROWS, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(checkpoint.bytes_of("packed"), packed.reshape(-1))


def test_agrees_with_the_reader_of_the_gguf_package(package_file: Path) -> None:
    theirs = gguf.GGUFReader(package_file)
    ours = open_checkpoint(package_file)
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert (info.offset, info.nbytes) == (t.data_offset, t.n_bytes)
        assert tuple(reversed(t.shape.tolist())) == info.shape


def test_views_are_read_only_and_outlive_the_checkpoint(package_file: Path) -> None:
    checkpoint = open_checkpoint(package_file)
    view = checkpoint.bytes_of("rows")
    assert not view.flags.writeable
    assert not view.flags.owndata
    assert np.shares_memory(view, checkpoint.bytes_of("rows"))
    checkpoint.close()
    checkpoint.close()
    del checkpoint
    gc.collect()
    assert np.array_equal(view.view("<f4").reshape(3, 64), ROWS)


def test_unknown_tensor_and_closed_checkpoint(package_file: Path) -> None:
    with open_checkpoint(package_file) as checkpoint, pytest.raises(TensorMissing, match="'nope'"):
        checkpoint.bytes_of("nope")
    with pytest.raises(AssertionError, match="closed"):
        checkpoint.bytes_of("rows")


def test_file_that_shrinks_or_goes_after_opening(package_file: Path) -> None:
    checkpoint = open_checkpoint(package_file)
    content = package_file.read_bytes()
    write(package_file, content[:-300])
    with pytest.raises(CheckpointMalformed, match=r"has become shorter.*'packed'"):
        checkpoint.bytes_of("packed")
    checkpoint = open_checkpoint(write(package_file, content))
    package_file.unlink()
    with pytest.raises(CheckpointNotFound, match="No such file"):
        checkpoint.bytes_of("packed")


@pytest.mark.parametrize("version", [2, 3])
def test_handmade_file(tmp_path: Path, version: int) -> None:
    data = ROWS[:1, :8].tobytes()
    entries = [tensor("a", [8]), tensor("b", [], offset=32)]
    checkpoint = open_bytes(
        tmp_path, gguf_bytes([architecture()], entries, data + b"\0\0\0\x40", version=version)
    )
    assert checkpoint.tensors["a"].shape == (8,)
    assert (checkpoint.tensors["a"].rows, checkpoint.tensors["a"].cols) == (1, 8)
    assert checkpoint.tensors["b"].shape == ()
    assert checkpoint.bytes_of("a").view("<f4").tolist() == list(range(8))
    assert checkpoint.bytes_of("b").view("<f4").tolist() == [2.0]


def test_alignment_of_the_file_decides_where_data_begins(tmp_path: Path) -> None:
    keys = [key("general.alignment", U32, u32(256))]
    content = gguf_bytes(keys, [tensor("a", [2])], b"\1\2\3\4\5\6\7\x08", alignment=256)
    checkpoint = open_bytes(tmp_path, content)
    assert checkpoint.tensors["a"].offset == 256
    assert checkpoint.bytes_of("a").tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_string_array_is_a_sequence(tmp_path: Path) -> None:
    words = ["zero", "eins", "", "三"]
    payload = items(STRING, 4, b"".join(map(text, words)))
    array = open_bytes(tmp_path, gguf_bytes([key("w", ARRAY, payload)])).metadata["w"]
    assert isinstance(array, StringArray)
    assert len(array) == 4
    assert [array[i] for i in range(4)] == words == list(array) == array[:]
    assert (array[-1], array[1:3], "eins" in array, array.index("三")) == (
        "三",
        ["eins", ""],
        True,
        3,
    )
    with pytest.raises(IndexError):
        array[4]


def test_string_array_element_that_is_not_utf8(tmp_path: Path) -> None:
    payload = items(STRING, 2, text("good") + text(b"\xff\xfe"))
    array = open_bytes(tmp_path, gguf_bytes([key("w", ARRAY, payload)])).metadata["w"]
    assert array[0] == "good"
    with pytest.raises(CheckpointMalformed, match="element 1 of 'w' is not UTF-8"):
        array[1]


def test_empty_arrays(tmp_path: Path) -> None:
    keys = [
        key("numbers", ARRAY, items(I32, 0, b"")),
        key("texts", ARRAY, items(STRING, 0, b"")),
        key("nested", ARRAY, items(ARRAY, 0, b"")),
        key("bools", ARRAY, items(BOOL, 0, b"")),
    ]
    metadata = open_bytes(tmp_path, gguf_bytes(keys)).metadata
    assert [len(value) for value in metadata.values()] == [0, 0, 0, 0]


def deep(levels: int) -> bytes:
    payload = items(U8, 1, b"\7")
    for _ in range(levels - 1):
        payload = items(ARRAY, 1, payload)
    return payload


def test_nested_array_at_the_limit(tmp_path: Path) -> None:
    value = open_bytes(tmp_path, gguf_bytes([key("n", ARRAY, deep(4))])).metadata["n"]
    assert value[0][0][0].tolist() == [7]


TWO = [tensor("first", [8]), tensor("second", [8], offset=32)]
WRONG = {
    "v1": (gguf_bytes([architecture()], version=1), "version 1"),
    "v4": (gguf_bytes([architecture()], version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "other magic": (gguf_bytes(magic=b"GGML"), "begins with b'GGML'"),
    "empty": (b"", "begins with b''"),
    "short": (b"GGUF\3\0\0\0", "ends inside its header"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "key count": (gguf_bytes(key_count=1 << 40), "claims 1099511627776 metadata keys"),
    "key count beyond the file": (gguf_bytes(key_count=2), "claims 2 metadata keys"),
    "tensor count": (gguf_bytes(tensor_count=1 << 63), "claims 9223372036854775808 tensors"),
    "key twice": (gguf_bytes([architecture(), architecture()]), "architecture' occurs twice"),
    "empty key": (gguf_bytes([key("", U8, b"\0" * 9)]), "metadata key before byte 32 is empty"),
    "key not UTF-8": (gguf_bytes([key(b"\xff\xff", U8, b"\1")]), "not UTF-8"),
    "long key": (gguf_bytes([u64(1 << 50) + bytes(20)]), "length of 1125899906842624 bytes"),
    "value type": (gguf_bytes([key("k", 13, b"\1")]), "'k' has the unknown value type 13"),
    "bool of 2": (gguf_bytes([key("k", BOOL, b"\2")]), "boolean of value 2"),
    "bool array of 2": (
        gguf_bytes([key("k", ARRAY, items(BOOL, 3, b"\0\1\2"))]),
        "neither 0 nor 1",
    ),
    "text length": (gguf_bytes([key("k", STRING, u64(1 << 20))]), "'k' needs 1048576 bytes"),
    "text length 2^64-1": (gguf_bytes([key("k", STRING, u64((1 << 64) - 1))]), "'k' claims"),
    "array type": (gguf_bytes([key("k", ARRAY, items(99, 1, b"\0"))]), "unknown type 99"),
    "array length": (gguf_bytes([key("k", ARRAY, items(F32, 1 << 62, b"\0"))]), "claims"),
    "array beyond the file": (gguf_bytes([key("k", ARRAY, items(F32, 9, b"\0"))]), "needs 36"),
    "texts beyond the file": (
        gguf_bytes([key("k", ARRAY, items(STRING, 3, text("a")))]),
        "string 0 of the array 'k'",
    ),
    "text of an array too long": (
        gguf_bytes([key("k", ARRAY, items(STRING, 2, text("a") + u64(1 << 63)))]),
        "string 1 of the array 'k'",
    ),
    "deep array": (gguf_bytes([key("k", ARRAY, deep(5))]), "nests deeper than 4"),
    "alignment 0": (gguf_bytes([key("general.alignment", U32, u32(0))]), "alignment is 0"),
    "alignment 48": (gguf_bytes([key("general.alignment", U32, u32(48))]), "alignment is 48"),
    "alignment text": (
        gguf_bytes([key("general.alignment", STRING, text("32"))]),
        "not an integer",
    ),
    "tensor twice": (gguf_bytes([], [TWO[0], TWO[0]], bytes(64)), "'first' occurs twice"),
    "tensor without name": (gguf_bytes([], [tensor("", [8])], bytes(64)), "name before byte 32"),
    "rank 5": (gguf_bytes([], [tensor("t", [1] * 5)], bytes(64)), "'t' has 5 dimensions"),
    "rank 2^32-1": (
        gguf_bytes([], [tensor("t", [8], rank=(1 << 32) - 1)], bytes(64)),
        "'t' has 4294967295 dimensions",
    ),
    "dimension 0": (gguf_bytes([], [tensor("t", [8, 0])], bytes(64)), "'t' has a dimension of 0"),
    "dimension 2^64-1": (
        gguf_bytes([], [tensor("t", [(1 << 64) - 1] * 4)], bytes(64)),
        "'t' should end at byte",
    ),
    "ragged row": (
        gguf_bytes([], [tensor("t", [640], kind=GGML_Q4_K)], bytes(4096)),
        "'t' has rows of 640 values, but Q4_K",
    ),
    "ragged row of 31": (
        gguf_bytes([], [tensor("t", [31, 32], kind=GGML_Q8_0)], bytes(4096)),
        "'t' has rows of 31 values",
    ),
    "misaligned": (gguf_bytes([], [tensor("t", [2], offset=8)], bytes(64)), "'t' starts at 8"),
    "past the end": (gguf_bytes([], [*TWO], bytes(60)), "'second' should end.*truncated"),
    "offset 2^63": (
        gguf_bytes([], [tensor("t", [2], offset=1 << 63)], bytes(64)),
        "'t' should end",
    ),
    "overlap": (
        gguf_bytes([], [tensor("first", [9]), tensor("second", [8], offset=32)], bytes(64)),
        "'first' and 'second' overlap",
    ),
    "same place": (
        gguf_bytes([], [tensor("first", [8]), tensor("second", [8])], bytes(64)),
        "'first' and 'second' overlap",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = WRONG[case]
    with pytest.raises(CheckpointMalformed, match=message) as caught:
        open_bytes(tmp_path, content)
    assert "m.gguf" in str(caught.value)


def test_unknown_tensor_type_is_refused_by_name(tmp_path: Path) -> None:
    content = gguf_bytes([], [tensor("odd", [32], kind=4)], bytes(64))
    with pytest.raises(TensorTypeUnknown, match="'odd' is stored as ggml type 4"):
        open_bytes(tmp_path, content)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nothing at"):
        open_checkpoint(tmp_path / "none.gguf")


def test_overlap_is_seen_in_any_order(tmp_path: Path) -> None:
    inner = [tensor("big", [64]), tensor("inside", [1], offset=32), tensor("after", [8], offset=64)]
    with pytest.raises(CheckpointMalformed, match="'big' and 'inside' overlap"):
        open_bytes(tmp_path, gguf_bytes([], inner[::-1], bytes(512)))


def test_gaps_and_surplus_bytes_between_tensors_are_fine(tmp_path: Path) -> None:
    entries = [tensor("late", [8], offset=256), tensor("early", [8], offset=64)]
    checkpoint = open_bytes(tmp_path, gguf_bytes([], entries, bytes(999)))
    assert checkpoint.tensors["late"].offset - checkpoint.tensors["early"].offset == 192


def test_a_large_sparse_file_opens_without_reading_its_data(tmp_path: Path) -> None:
    rows = 4_000_000
    step = rows * 2560  # float32 bytes of one of two tensors [rows, 640]
    entries = [tensor("a", [640, rows]), tensor("b", [640, rows], offset=step)]
    head = gguf_bytes([architecture()], entries)
    path = tmp_path / "sparse.gguf"
    size = len(head) + -len(head) % 32 + 2 * step
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
        file.seek(size - 4)
        file.write(b"\0\0\x80\x3f")
    code = f"""
import resource, tracemalloc
from civetta.checkpoint.source import open_checkpoint
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
tracemalloc.start()
checkpoint = open_checkpoint({str(path)!r})
view = checkpoint.bytes_of("b")
assert view.nbytes == {step} and view[-4:].view("<f4")[0] == 1.0
print(peak() - before, tracemalloc.get_traced_memory()[1])
"""
    rss_kib, traced_bytes = map(int, run_python(code).split())
    assert size > 20e9
    assert rss_kib < 16 * 1024
    assert traced_bytes < 1 << 20


def test_a_sparse_file_with_a_claimed_long_array(tmp_path: Path) -> None:
    """The claim fits into the file, but no real header has it: a ceiling stops it."""
    path = tmp_path / "sparse.gguf"
    for kind in (STRING, U64, BOOL, ARRAY):
        write(path, gguf_bytes([key("k", ARRAY, items(kind, 1 << 30, b""))]))
        with path.open("r+b") as file:
            file.truncate(20_000_000_000)
        with pytest.raises(CheckpointMalformed, match="'k' claims 1073741824 items"):
            open_checkpoint(path)


def test_arrays_share_one_ceiling(tmp_path: Path) -> None:
    """Two arrays of empty strings (zeros of a sparse file); either alone would be accepted."""
    half = 3 << 20
    first = gguf_bytes([key("a", ARRAY, items(STRING, half, b""))], key_count=2)
    path = write(tmp_path / "m.gguf", first)
    with path.open("r+b") as file:
        file.seek(len(first) + 8 * half)
        file.write(key("b", ARRAY, items(STRING, half, b"")))
        file.truncate(1 << 27)
    with pytest.raises(CheckpointMalformed, match="'b' claims 3145728 items"):
        open_checkpoint(path)


def test_nested_arrays_have_a_lower_ceiling(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", gguf_bytes([key("a", ARRAY, items(ARRAY, 1 << 17, b""))]))
    with path.open("r+b") as file:
        file.truncate(1 << 24)
    with pytest.raises(CheckpointMalformed, match="'a' claims 131072 items"):
        open_checkpoint(path)
