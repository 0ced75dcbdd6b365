"""What a launch of a GPU kernel cannot avoid: bytes through device memory, and operations.

Counted from the launch's own arguments: every input read once, every output written once, products
as multiply and add. What depends on the data (experts met, keys seen) is read from the launch's
tables, so counting waits for the device; it belongs beside a measurement, not into one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from civetta.kernels.fused.launch import ROW_FIELDS, SESSION_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes and operations of one launch; `detail` tells uses of one kernel apart."""

    nbytes: float
    flop: float = 0.0
    detail: str = ""


def cost_of(kernel: str, arguments: Mapping[str, Any]) -> Cost | None:
    """The cost of a launch; None for a kernel that is not known here."""
    known = COSTS.get(kernel)
    return None if known is None else known(arguments)


_PLANES = ("codes", "high", "scale", "minimum", "d", "dmin")


def _size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _planes(a: Mapping[str, Any]) -> int:
    """Bytes of a packed weight's planes; absent planes are stood in for by another argument."""
    planes = {a[name].data_ptr(): a[name] for name in _PLANES if isinstance(a.get(name), Tensor)}
    for name in ("x", "m"):
        if isinstance(a.get(name), Tensor):
            planes.pop(a[name].data_ptr(), None)
    return _size(*planes.values())


def _product(a: Mapping[str, Any]) -> Cost:
    rows, outputs, inputs = int(a["M"]), int(a["N"]) * (2 if a["PAIR"] else 1), int(a["K"])
    weight = float(_planes(a))
    if a["GROUPED"] == "direct":
        weight *= len(a["slot"][:rows].unique()) / len(a["codes"])
    elif a["GROUPED"] == "sorted":
        met = a["tile_expert"].unique()
        weight *= len(met[met >= 0]) / len(a["codes"])
    x, y = a["x"], a["y"]
    moved = rows // int(a["x_divisor"]) * inputs * x.element_size()
    moved += rows * int(a["N"]) * y.element_size()
    name = f"{a['CODE']}{a['BITS'] or ''} {inputs} -> {outputs}" + (
        f", {len(a['codes'])} experts" if a["GROUPED"] else ""
    )
    return Cost(nbytes=weight + moved, flop=2.0 * rows * outputs * inputs, detail=name)


def _two_products(a: Mapping[str, Any]) -> Cost:
    """The sum of both; arguments of each begin with its letter."""
    first, second = (
        _product({k[2:]: v for k, v in a.items() if k[:2].lower() == letter})
        for letter in ("a_", "b_")
    )
    return Cost(
        nbytes=first.nbytes + second.nbytes,
        flop=first.flop + second.flop,
        detail=f"{first.detail}; {second.detail}",
    )


def _dense(a: Mapping[str, Any]) -> Cost:
    rows, outputs, inputs = int(a["M"]), 64 * int(a["TILES"]), int(a["K"])
    x, w = (getattr(a[name], "base", a[name]) for name in "xw")  # of a tensor descriptor
    moved = rows * (inputs * x.element_size() + int(a["N"]) * a["y"].element_size())
    flop = 2.0 * rows * outputs * inputs
    return Cost(nbytes=moved + _size(w), flop=flop, detail=f"{inputs} -> {outputs}")


def _unpack(a: Mapping[str, Any]) -> Cost:
    """Planes read, numbers written; absent planes are stood in for by another argument."""
    planes = {a[name].data_ptr(): a[name] for name in _PLANES}
    return Cost(
        nbytes=float(_size(a["y"], *(p for p in planes.values() if p.dtype == a["codes"].dtype)))
    )


def _mix(a: Mapping[str, Any]) -> Cost:
    rows, width, rank, streams = int(a["T"]), int(a["D"]), int(a["K"]), int(a["S"])
    moved = _planes(a) + _size(a["m"], a["x"], a["h"])
    return Cost(nbytes=moved, flop=2.0 * rows * rank * width * streams)


def _enter(a: Mapping[str, Any]) -> Cost:
    values = float(a["x"].numel())
    read = values * 4 * (2 if a["WRITE"] else 1)
    read += _size(a["y"]) if a["WRITE"] else 0
    return Cost(nbytes=read + _size(a["normed"]) + (_size(a["w_inject"]) if a["INJECT"] else 0))


def _field(table: Tensor, fields: tuple[str, ...], name: str) -> Tensor:
    return table[fields.index(name)]


def _seen(a: Mapping[str, Any]) -> Tensor:
    """Tokens that each row of a launch sees, itself included; of rows that belong to a session."""
    there = _field(a["rows"], ROW_FIELDS, "session") >= 0
    return _field(a["rows"], ROW_FIELDS, "position")[there] + 1


def _attend(a: Mapping[str, Any]) -> Cost:
    """Keys and values: what rows read, but no page more than once."""
    seen, n, keep = _seen(a), int(a["N"]), int(a["keep"])
    heads, groups, width = int(a["G"]) * int(a["R"]), int(a["G"]), int(a["A"])
    read = torch.where(seen // n > keep, keep * n + seen % n, seen).sum().item()
    each = 2 * groups * width * a["k_pages"].element_size()
    moved = min(read, _tokens(a)) * each + 2 * _size(a["q"])
    return Cost(nbytes=moved, flop=4.0 * read * heads * width)


def _tokens(a: Mapping[str, Any]) -> float:
    """Tokens of all sequences of a launch."""
    rows = _field(a["sessions"], SESSION_FIELDS, "rows")
    return float((_field(a["sessions"], SESSION_FIELDS, "first") + rows).sum().item())


def _scores(a: Mapping[str, Any]) -> Cost:
    n, keep = int(a["N"]), int(a["keep"])
    blocks = _tokens(a) // n
    if blocks <= keep:
        return Cost(nbytes=0.0)
    rows, heads, width = len(a["scores"]), int(a["I"]), int(a["X"])
    moved = blocks * width * a["key_pages"].element_size() + rows * blocks * 4
    return Cost(nbytes=moved, flop=2.0 * rows * blocks * heads * width)


def _select(a: Mapping[str, Any]) -> Cost:
    seen = _seen(a)[int(a["start"]) : int(a["start"]) + len(a["scores"])] // int(a["N"])
    read = torch.where(seen > int(a["keep"]), seen + int(a["keep"]), 0).sum().item()
    return Cost(nbytes=4.0 * read)


def _conv(a: Mapping[str, Any]) -> Cost:
    channels = (2 * int(a["H"]) + int(a["V"])) * int(a["A"])
    rows = int(a["T"])
    own = rows * channels * a["u"].element_size() + _size(a["mixed"])
    return Cost(nbytes=own, flop=2.0 * rows * channels * int(a["TAPS"]))


def _chunks(a: Mapping[str, Any]) -> float:
    """Chunks of 64 rows that hold anything, of one head."""
    fields = ("first", "base", "rows")
    first, base, rows = (_field(a["sessions"], SESSION_FIELDS, name) for name in fields)
    return float(((first - base + rows + 63) // 64).sum().item())


def _prepare(a: Mapping[str, Any]) -> Cost:
    chunks, width = _chunks(a) * int(a["V"]), int(a["A"])
    read = chunks * 64 * 3 * width * a["mixed"].element_size()
    made = chunks * 64 * (2 * width + 64) * 4
    # k k^T and q k^T, eight products of the inverse (64 wide), u and w
    return Cost(nbytes=read + made, flop=chunks * 2.0 * 64 * 64 * (4 * width + 8 * 64))


def _walk(a: Mapping[str, Any]) -> Cost:
    chunks, width = _chunks(a) * int(a["V"]), int(a["A"])
    moved = chunks * 64 * ((2 * width + 64) * 4 + 3 * width * a["mixed"].element_size())
    moved += a["sessions"].shape[1] * int(a["V"]) * width * width * 8
    return Cost(nbytes=moved, flop=chunks * 2.0 * 64 * width * (3 * width + 64))


def _moved(*names: str) -> Callable[[Mapping[str, Any]], Cost]:
    """Every named argument once."""
    return lambda a: Cost(nbytes=float(_size(*(a[name] for name in names))))


def _gated_norm(a: Mapping[str, Any]) -> Cost:
    return Cost(nbytes=3.0 * _size(a["y"]))


def _heads(a: Mapping[str, Any]) -> Cost:
    """Queries, keys, values and index rows of a launch's tokens, read and written."""
    per_row = (int(a["Q"]) + 2 * int(a["G"])) * int(a["A"]) + (int(a["I"]) + 1) * int(a["X"])
    return Cost(nbytes=2.0 * int(a["T"]) * per_row * a["q"].element_size())


def _pool(a: Mapping[str, Any]) -> Cost:
    rows = _field(a["sessions"], SESSION_FIELDS, "rows").sum().item()
    return Cost(nbytes=rows * int(a["X"]) * a["raw_pages"].element_size() * (1 + 1 / int(a["N"])))


def _kept(a: Mapping[str, Any]) -> Cost:
    """Rows behind the last whole chunk: at most a chunk and what may be taken back, a session."""
    row = (int(a["H"]) + int(a["V"])) * int(a["A"]) * a["mixed"].element_size()
    return Cost(nbytes=2.0 * a["sessions"].shape[1] * 64 * row)


def _pushed(a: Mapping[str, Any]) -> Cost:
    ring = int(a["RING"]) * int(a["C"]) * a["x"].element_size()
    return Cost(nbytes=2.0 * a["sessions"].shape[1] * ring)


def _embed(a: Mapping[str, Any]) -> Cost:
    rows, width = int(a["T"]), int(a["D"])
    return Cost(nbytes=rows * width * a["codes"].element_size() + _size(a["x"]))


COSTS: dict[str, Callable[[Mapping[str, Any]], Cost]] = {
    "product_kernel": _product,
    "two_products_kernel": _two_products,
    "dense_kernel": _dense,
    "described_kernel": _dense,
    "unpack_kernel": _unpack,
    "mix_kernel": _mix,
    "enter_kernel": _enter,
    "combine_kernel": _moved("y", "out"),
    "rows_kernel": _heads,
    "pool_kernel": _pool,
    "scores_kernel": _scores,
    "row_scores_kernel": _scores,
    "select_kernel": _select,
    "sieve_kernel": _select,
    "passes_kernel": _select,
    "attend_kernel": _attend,
    "merge_kernel": _moved("best", "weight", "partial", "y"),
    "conv_kernel": _conv,
    "prepare_kernel": _prepare,
    "walk_kernel": _walk,
    "prepare_few_kernel": _prepare,
    "prepare_float32_kernel": _prepare,
    "walk_float32_kernel": _walk,
    "walk_few_kernel": _walk,
    "gated_norm_kernel": _gated_norm,
    "keep_kernel": _kept,
    "push_kernel": _pushed,
    "angle_kernel": _moved("cos", "sin"),
    "embed_kernel": _embed,
    "gate_kernel": _moved("x", "rows_out", "gated", "normed"),
    "add_kernel": _moved("x", "x", "gated", "normed"),
    "best_of_segment_kernel": _moved("logits", "lists", "sums"),
    "best_of_row_kernel": _moved("lists", "sums", "totals"),
    "route_kernel": _moved("logits", "ids", "weights"),
}
