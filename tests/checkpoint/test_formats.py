"""Format rows against ggml's own table, and the byte counts that model.md C.5 names."""

from __future__ import annotations

import gguf
import pytest

from checkpoint.handmade import run_python
from civetta.checkpoint import formats

GGML_FORMATS = [f for f in formats.ALL_FORMATS if f.ggml_type is not None]
# intermediate types of ggml's dot products, and a type without a public decoder to compare with
NOT_DECODED = {"Q8_1", "Q8_K", "Q1_0"}


@pytest.mark.parametrize("fmt", GGML_FORMATS, ids=lambda f: f.name)
def test_ggml_row_equals_the_ggml_type_table(fmt: formats.QuantFormat) -> None:
    kind = gguf.GGMLQuantizationType(fmt.ggml_type)
    assert (fmt.block_values, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert fmt.name.removeprefix("GGML_") == kind.name
    assert formats.by_ggml_type(kind) is fmt


def test_every_ggml_type_has_a_row_or_is_named_here() -> None:
    missing = {kind.name for kind in gguf.GGMLQuantizationType if not formats.by_ggml_type(kind)}
    assert missing == NOT_DECODED


def test_names_and_ids_are_unique() -> None:
    assert len({f.name for f in formats.ALL_FORMATS}) == len(formats.ALL_FORMATS)
    assert len({f.ggml_type for f in GGML_FORMATS}) == len(GGML_FORMATS)
    assert all(formats.by_name(f.name) is f for f in formats.ALL_FORMATS)


def test_unknown_types_are_none() -> None:
    assert formats.by_ggml_type(4) is None  # Q4_2, removed from ggml
    assert formats.by_ggml_type(999) is None
    assert formats.by_safetensors_dtype("F8_E5M2") is None
    assert formats.by_safetensors_dtype("Q8_0") is None
    assert formats.by_name("q8_0") is None


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("F32", 4), ("BF16", 2), ("F16", 2), ("I64", 8), ("U8", 1), ("F8_E4M3", 1), ("F64", 8)],
)
def test_safetensors_dtypes(dtype: str, size: int) -> None:
    fmt = formats.by_safetensors_dtype(dtype)
    assert fmt is not None
    assert (fmt.name, fmt.block_bytes, fmt.block_values) == (dtype, size, 1)


@pytest.mark.parametrize(
    ("fmt", "size"),
    [
        (formats.BF16, 320),
        (formats.Q8_0, 170),
        (formats.Q5_1, 120),
        (formats.Q5_0, 110),
        (formats.Q4_1, 100),
        (formats.IQ4_NL, 90),
        (formats.Q4_0, 90),
        (formats.F8_E4M3, 160),
        (formats.NVFP4, 80),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_bytes_of_a_table_row(fmt: formats.QuantFormat, size: int) -> None:
    assert fmt.row_bytes(160) == size


def test_a_row_is_whole_blocks() -> None:
    with pytest.raises(ValueError, match="640 values are not whole Q4_K blocks of 256"):
        formats.Q4_K.row_bytes(640)


def test_formats_does_not_import_torch() -> None:
    code = "import sys, civetta.checkpoint.formats; print('torch' in sys.modules)"
    assert run_python(code) == "False\n"
