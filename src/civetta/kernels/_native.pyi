"""The compiled extension: products, mixers and row-local ops on the CPU (sources in `native/`).

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

class View:
    """A strided activation [T, H, A]: address, row and head stride, whether bfloat16."""

    def __init__(self, data: int, row_stride: int, head_stride: int, bf16: bool, /) -> None: ...

class Cache:
    """Pages of keys and values, which share their strides."""

    def __init__(
        self,
        k: int,
        v: int,
        bf16: bool,
        page_stride: int,
        place_stride: int,
        group_stride: int,
        page_tokens: int,
        groups: int,
        width: int,
        /,
    ) -> None: ...

def rms_norm(
    x: int,
    row_stride: int,
    head_stride: int,
    x_bf16: bool,
    rows: int,
    heads: int,
    width: int,
    gain: int,
    gain_stride: int,
    eps: float,
    y: int,
    /,
) -> None:
    """y has the type of x; gain_stride 0 where all heads share one gain."""

def rope(
    x: int,
    row_stride: int,
    head_stride: int,
    x_bf16: bool,
    rows: int,
    heads: int,
    width: int,
    cos: int,
    sin: int,
    half: int,
    y: int,
    /,
) -> None:
    """cos and sin are contiguous [rows, half]."""

def hyper_read(
    down: Matrix,
    up: Matrix,
    inject: Matrix,
    injects: bool,
    gain: int,
    streams: int,
    width: int,
    eps: float,
    x: int,
    rows: int,
    h: int,
    h_bf16: bool,
    strengths: int,
    /,
) -> None:
    """Norm, both products, mixing and write strengths; `inject` is not read unless `injects`."""

def hyper_write(
    x: int,
    y: int,
    y_stride: int,
    y_bf16: bool,
    inject: int,
    rows: int,
    streams: int,
    width: int,
    out: int,
    /,
) -> None:
    """out = x + inject * y in every stream."""

def swiglu(
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    bf16: bool,
    rows: int,
    width: int,
    y: int,
    /,
) -> None:
    """y = silu(gate) * up."""

def ngram_gate(
    x: int,
    key: int,
    key_stride: int,
    key_stream_stride: int,
    key_bf16: bool,
    value: int,
    value_stride: int,
    value_bf16: bool,
    gain_query: int,
    gain_key: int,
    rows: int,
    streams: int,
    width: int,
    eps: float,
    out: int,
    /,
) -> None:
    """The gated value of every stream, float32."""

def route(
    logits: int,
    rows: int,
    count: int,
    slots: int,
    ids: int,
    weights: int,
    /,
) -> None:
    """The best `slots` of `count`; raises ValueError for more slots than there are."""

def index_pool(
    raw: int,
    block_stride: int,
    row_stride: int,
    raw_bf16: bool,
    blocks: int,
    ratio: int,
    width: int,
    gain: int,
    eps: float,
    cos: int,
    sin: int,
    half: int,
    y: int,
    /,
) -> None:
    """Pooled, normed and turned keys of blocks."""

def short_conv(
    u: int,
    u_stride: int,
    u_bf16: bool,
    history: int,
    history_stride: int,
    history_bf16: bool,
    w: int,
    taps: int,
    dilation: int,
    rows: int,
    channels: int,
    y: int,
    /,
) -> None:
    """silu of the convolution; raises ValueError for more than 16 taps."""

def delta_gates(
    a: int,
    b: int,
    scale: int,
    bias: int,
    rows: int,
    heads: int,
    log_decay: int,
    beta: int,
    /,
) -> None:
    """Gates of the delta rule, all float32 and contiguous."""

def delta_chunks(
    q: View,
    k: View,
    v: View,
    log_decay: int,
    beta: int,
    gate_stride: int,
    state: int,
    rows: int,
    key_heads: int,
    value_heads: int,
    width: int,
    tiled: bool,
    first_new: int,
    fold: int,
    out: int,
    state_out: int,
    /,
) -> None:
    """The chunked delta rule; state_out is written when `fold` is not 0."""

def delta_norm(
    o: View,
    z: View,
    gain: int,
    rows: int,
    heads: int,
    width: int,
    eps: float,
    y: int,
    /,
) -> None:
    """gain * o / rms(o) * sigmoid(z)."""

def attend_dense(
    q: View,
    cache: Cache,
    table: int,
    rows: int,
    heads: int,
    first: int,
    out: int,
    /,
) -> None:
    """Query t sees keys 0 .. first + t."""

def attend_sparse(
    q: View,
    cache: Cache,
    table: int,
    rows: int,
    heads: int,
    tokens: int,
    length: int,
    out: int,
    /,
) -> None:
    """Query t sees tokens[t], a list ended by -1 or its length."""

def attend_image(
    q: View,
    k: View,
    v: View,
    rows: int,
    keys: int,
    heads: int,
    width: int,
    out: int,
    /,
) -> None:
    """Every query sees every key."""

def choose_blocks(
    q: View,
    keys: int,
    keys_bf16: bool,
    page_stride: int,
    page_blocks: int,
    table: int,
    blocks: int,
    rows: int,
    heads: int,
    width: int,
    keep: int,
    out: int,
    /,
) -> None:
    """The best `keep` of the blocks each query sees, ascending."""

def set_threads(threads: int, /) -> None:
    """Threads a call may use, the caller included, from the next call on."""

def get_threads() -> int: ...
def shut_down() -> None:
    """Ends the threads (registered with atexit); later calls run on their caller alone."""

def use_instructions(name: str, /) -> None:
    """Force "avx512", "avx2", "neon" or "generic"; "" takes the best. For tests."""

def instructions() -> str:
    """The instruction set in use."""
