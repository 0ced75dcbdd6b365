"""What every op of a GPU's launch gives, by name, and where two ways to launch the same rows differ.

For programs that look for the first difference in bits: gpu_trace.py, gpu_long.py.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from civetta.kernels.fused import attend as attend_module
from civetta.kernels.fused import mixture as mixture_module
from civetta.kernels.fused import streams as streams_module
from civetta.model.gpu import layers as layers_module
from civetta.model.gpu.layers import GpuLayers
from civetta.model.gpu.trunk import GpuTrunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from civetta.model.trunk import Trunk

    Outputs = Callable[[tuple[Any, ...], Any], dict[str, Tensor | None]]


def _kept(args: tuple[Any, ...], kept: Tensor) -> dict[str, Tensor | None]:
    """Blocks of the rows that choose; others' places are never written."""
    batch, _, _, ratio, keep = args
    chooses = (batch.rows_FT[0] + 1) // ratio > keep
    return {"kept": torch.where(chooses[:, None], kept, 0)}


OPS: tuple[tuple[Any, str, Outputs], ...] = (
    (
        layers_module,
        "enter",
        lambda a, r: {"x": a[0], "normed": r.normed, "scale": r.scale, "strengths": r.inject},
    ),
    (streams_module, "product", lambda a, _: {f"y of {a[1].shape}": a[2]}),
    (layers_module, "mix", lambda _, r: {"h": r}),
    (layers_module, "product", lambda a, _: {f"y of {a[1].shape}": a[2]}),
    (layers_module, "delta", lambda _, r: {"y": r}),
    (attend_module, "choose", _kept),
    (layers_module, "attend", lambda _, r: {"y": r}),
    (mixture_module, "product", lambda a, _: {f"y of {a[1].shape}": a[2]}),
    (mixture_module, "route", lambda _, r: {"experts": r[0], "weights": r[1]}),
    (layers_module, "ngram_layer", lambda a, _: {"x": a[1]}),
)
"""Functions by the module that calls them, and what they give: from arguments and result."""


@dataclass
class Seen:
    """Copies of one launch's tensors in order, each with its op's name; `rows` of the launch.

    `reads`: how often the streams were read, twice a layer.
    """

    rows: int = 0
    reads: int = 0
    ops: list[tuple[str, Tensor]] = field(default_factory=list)


@contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """While the block runs, `seen` is what the last launch gave. Captured graphs are not seen."""

    def watched(module: Any, name: str, outputs: Outputs) -> Callable[..., Any]:
        call, where = getattr(module, name), module.__name__.rpartition(".")[2]

        def run(*args: Any, **named: Any) -> Any:
            result = call(*args, **named)
            for key, tensor in outputs(args, result).items():
                if tensor is not None:
                    label = f"layer {(seen.reads - 1) // 2}, {where}.{name} {key}"
                    seen.ops.append((label, tensor.clone()))
            return result

        return run

    begin, read = GpuLayers.begin, GpuLayers._read

    def first(layers: GpuLayers, batch: Any) -> Any:
        seen.rows, seen.reads, seen.ops = batch.rows, 0, []
        return begin(layers, batch)

    def next_read(layers: GpuLayers, *args: Any) -> Any:
        seen.reads += 1
        return read(layers, *args)

    with ExitStack() as stack:
        for module, name, outputs in OPS:
            stack.enter_context(patch.object(module, name, watched(module, name, outputs)))
        stack.enter_context(patch.object(GpuLayers, "begin", first))
        stack.enter_context(patch.object(GpuLayers, "_read", next_read))
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Every op's rows [T, n] of a whole sequence, by number and name, logits last."""

    names: tuple[str, ...]
    rows: tuple[Tensor, ...]


def trace(trunk: Trunk, ids: Sequence[int], edges: Sequence[int]) -> Trace:
    """All ops of all rows, launched kernel by kernel between `edges`; tensors stay on the device."""
    session = trunk.store(sessions=1, context_tokens=len(ids)).open()
    seen, parts, names = Seen(), [], None
    eager = trunk.without_graphs() if isinstance(trunk, GpuTrunk) else nullcontext()
    with eager, watching(seen):
        for start, stop in pairwise(edges):
            logits = trunk.forward(session, ids[start:stop], "all")
            found = [*seen.ops, ("logits", logits)]
            own = tuple(f"op {i}: {name}" for i, (name, _) in enumerate(found))
            assert names in {None, own}, "launches of other sizes have other ops"
            names = own
            # rows that only fill a launch up lie behind the others
            each = [len(t) // (stop - start if n == "logits" else seen.rows) for n, t in found]
            count = stop - start
            parts.append(
                [t[: count * n].reshape(count, -1) for (_, t), n in zip(found, each, strict=True)]
            )
    assert names is not None
    return Trace(names=names, rows=tuple(torch.cat(op) for op in zip(*parts, strict=True)))


def difference(one: Trace, other: Trace) -> dict[str, Any] | None:
    """Where two traces of the same rows first differ; None when they are equal, bit for bit.

    A row depends on earlier rows only, so the first op of the first row that differs is where a fault
    shows first, whatever it spreads to.
    """
    assert one.names == other.names
    differs = torch.stack(
        [
            ((a != b) & ~(a.isnan() & b.isnan())).any(1)
            for a, b in zip(one.rows, other.rows, strict=True)
        ]
    ).cpu()
    bad_rows = differs.any(0).nonzero().flatten().tolist()
    if not bad_rows:
        return None
    row = bad_rows[0]
    op = int(differs[:, row].nonzero()[0])
    a, b = one.rows[op][row].double(), other.rows[op][row].double()
    columns = (a != b).nonzero().flatten().tolist()
    lowest = int(differs.any(1).nonzero()[0])
    return {
        "row": row,
        "op": one.names[op],
        "columns": columns[:8],
        "relative": float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)),
        "rows that differ": len(bad_rows),
        "rows whose logits differ": int(differs[-1].sum()),
        "lowest op that differs anywhere": one.names[lowest],
        "its rows": differs[lowest].nonzero().flatten().tolist()[:8],
    }
