"""Block formats of stored weights: one frozen row each (bytes and values a block, file type ids).

Sizes are those of the ggml type table; FP8 and NVFP4 rows describe the safetensors releases
(model.md A.7, A.8), whose scales live in companion tensors. A type that is in no row here is one
civetta cannot decode: `by_ggml_type` and `by_safetensors_dtype` answer None and the reader refuses
the tensor by name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFormat:
    """One storage format.

    `block_values` consecutive values of a row take `block_bytes` bytes. `ggml_type` is the GGUF
    type id or None; `safetensors_dtype` the dtype string of a safetensors header or None.
    """

    name: str
    block_values: int
    block_bytes: int
    ggml_type: int | None = None
    safetensors_dtype: str | None = None

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of `values` values; raises ValueError when it is no whole block."""
        blocks, rest = divmod(values, self.block_values)
        if rest:
            raise ValueError(
                f"{values} values are not whole {self.name} blocks of {self.block_values}"
            )
        return blocks * self.block_bytes


def _plain(name: str, size: int, ggml_type: int | None = None) -> QuantFormat:
    """A type of one value a block that safetensors spells by the same name."""
    return QuantFormat(
        name=name,
        block_values=1,
        block_bytes=size,
        ggml_type=ggml_type,
        safetensors_dtype=name,
    )


def _block(name: str, values: int, size: int, ggml_type: int) -> QuantFormat:
    """A ggml block type, in GGUF files only."""
    return QuantFormat(name=name, block_values=values, block_bytes=size, ggml_type=ggml_type)


F32 = _plain("F32", 4, 0)
F16 = _plain("F16", 2, 1)
BF16 = _plain("BF16", 2, 30)
F64 = _plain("F64", 8, 28)
I8 = _plain("I8", 1, 24)
I16 = _plain("I16", 2, 25)
I32 = _plain("I32", 4, 26)
I64 = _plain("I64", 8, 27)
U8 = _plain("U8", 1)
BOOL = _plain("BOOL", 1)
F8_E4M3 = _plain("F8_E4M3", 1)

Q4_0 = _block("Q4_0", 32, 18, 2)
Q4_1 = _block("Q4_1", 32, 20, 3)
Q5_0 = _block("Q5_0", 32, 22, 6)
Q5_1 = _block("Q5_1", 32, 24, 7)
Q8_0 = _block("Q8_0", 32, 34, 8)
Q2_K = _block("Q2_K", 256, 84, 10)
Q3_K = _block("Q3_K", 256, 110, 11)
Q4_K = _block("Q4_K", 256, 144, 12)
Q5_K = _block("Q5_K", 256, 176, 13)
Q6_K = _block("Q6_K", 256, 210, 14)
IQ2_XXS = _block("IQ2_XXS", 256, 66, 16)
IQ2_XS = _block("IQ2_XS", 256, 74, 17)
IQ3_XXS = _block("IQ3_XXS", 256, 98, 18)
IQ1_S = _block("IQ1_S", 256, 50, 19)
IQ4_NL = _block("IQ4_NL", 32, 18, 20)
IQ3_S = _block("IQ3_S", 256, 110, 21)
IQ2_S = _block("IQ2_S", 256, 82, 22)
IQ4_XS = _block("IQ4_XS", 256, 136, 23)
IQ1_M = _block("IQ1_M", 256, 56, 29)
TQ1_0 = _block("TQ1_0", 256, 54, 34)
TQ2_0 = _block("TQ2_0", 256, 66, 35)
MXFP4 = _block("MXFP4", 32, 17, 39)
# ggml's own NVFP4 carries four e4m3 scales inside each block of 64; not the safetensors layout
GGML_NVFP4 = _block("GGML_NVFP4", 64, 36, 40)

# e2m1 pairs, low nibble = even column; scales are companion tensors (model.md A.8). A safetensors
# header calls such a tensor U8, so no dtype string leads here: the loader renames it.
NVFP4 = QuantFormat(name="NVFP4", block_values=2, block_bytes=1)

FLOAT_FORMATS = (F32, F16, BF16, F64)
INTEGER_FORMATS = (I8, I16, I32, I64, U8, BOOL)
COMPANION_SCALE_FORMATS = (F8_E4M3, NVFP4)
BLOCK_FORMATS = (
    *(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0),
    *(Q2_K, Q3_K, Q4_K, Q5_K, Q6_K),
    *(IQ4_NL, IQ4_XS, IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M),
    *(TQ1_0, TQ2_0, MXFP4, GGML_NVFP4),
)
ALL_FORMATS = (*FLOAT_FORMATS, *INTEGER_FORMATS, *COMPANION_SCALE_FORMATS, *BLOCK_FORMATS)

_BY_GGML_TYPE = {f.ggml_type: f for f in ALL_FORMATS if f.ggml_type is not None}
_BY_SAFETENSORS_DTYPE = {
    f.safetensors_dtype: f for f in ALL_FORMATS if f.safetensors_dtype is not None
}
_BY_NAME = {f.name: f for f in ALL_FORMATS}


def by_ggml_type(type_id: int) -> QuantFormat | None:
    """The format of a GGUF tensor type id, or None when civetta cannot decode it."""
    return _BY_GGML_TYPE.get(type_id)


def by_safetensors_dtype(dtype: str) -> QuantFormat | None:
    """The format of a safetensors dtype string, or None when civetta cannot decode it."""
    return _BY_SAFETENSORS_DTYPE.get(dtype)


def by_name(name: str) -> QuantFormat | None:
    """The format called `name`, or None."""
    return _BY_NAME.get(name)
