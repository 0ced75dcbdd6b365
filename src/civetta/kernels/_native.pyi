"""The compiled extension: products with stored weights on the CPU (sources in `native/`).

Addresses and strides are plain integers: the caller keeps the memory alive and has checked shapes
and dtypes. Strides count elements except where a name says bytes. Every call that computes
releases the GIL; calls from several threads are safe, the ones that find the threads busy run on
their caller alone.
"""

FORMATS: tuple[str, ...]
"""Names of the `QuantFormat`s that `Matrix` reads."""

class Matrix:
    """Where a weight matrix lies and how it is stored; owns nothing."""

    def __init__(
        self,
        storage: str,
        rows: int,
        cols: int,
        data: int,
        row_stride_bytes: int,
        scale: int,
        scale_stride: int,
        scale_2: float,
        row_offset: int,
        /,
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...

class Experts:
    """The matrices of one layer's routed experts (copies of the descriptors)."""

    def __init__(self, gate: list[Matrix], up: list[Matrix], down: list[Matrix], /) -> None: ...

def matmul(
    w: Matrix,
    x: int,
    x_stride: int,
    x_bf16: bool,
    rows: int,
    y: int,
    y_stride: int,
    y_bf16: bool,
    /,
) -> None:
    """y = x w^T for `rows` rows; x and y are float32 or bfloat16."""

def matmul_many(
    w: list[Matrix],
    x: int,
    x_stride: int,
    x_bf16: bool,
    rows: int,
    y: list[int],
    y_bf16: bool,
    /,
) -> None:
    """y[i] = x w[i]^T, every y[i] contiguous."""

def experts(
    w: Experts,
    h: int,
    h_stride: int,
    h_bf16: bool,
    ids: int,
    weights: int,
    rows: int,
    slots: int,
    y: int,
    /,
) -> None:
    """The weighted sum of experts, y float32 contiguous; raises IndexError for an unknown id."""

def set_threads(threads: int, /) -> None:
    """Threads a call may use, the caller included, from the next call on."""

def get_threads() -> int: ...
def shut_down() -> None:
    """Ends the threads (registered with atexit); later calls run on their caller alone."""

def use_instructions(name: str, /) -> None:
    """Force "avx512", "avx2", "neon" or "generic"; "" takes the best. For tests."""

def instructions() -> str:
    """The instruction set in use."""
