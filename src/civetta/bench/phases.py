"""Where the time of a forward goes: an `Ops` table and a row source that take the time of each call.

The network itself knows nothing of it: a trunk that is not timed runs the very ops it was given. A
call belongs to the part of the network whose op it is, or whose weight it reads. What passes
between two calls of one part (copies, views, pages) counts for that part too; what passes between
parts, and outside the network, is the rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from civetta.bench import gpu
from civetta.kernels.ops import Ops
from civetta.model.weights import GdnWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from civetta.model.inputs import RowSource
    from civetta.model.trunk import Trunk
    from civetta.model.weights import TrunkWeights

PHASES = ("embed", "ngram", "ple", "gdn", "qsa", "moe", "hc", "head", "rest")
"""In the order of the network; ngram is what a forward waits for rows of the table."""

PHASE_OF_OP = {
    "embed": "embed",
    "hyper_read": "hc",
    "hyper_write": "hc",
    "gdn_gates": "gdn",
    "gdn_chunks": "gdn",
    "gdn_norm": "gdn",
    "rope": "qsa",
    "index_pool": "qsa",
    "index_select": "qsa",
    "attend_dense": "qsa",
    "attend_sparse": "qsa",
    "route": "moe",
    "experts": "moe",
    "swiglu": "moe",
    "ple_gate": "ple",
}
OPS_BY_WEIGHT = frozenset({"matmul", "rms_norm", "short_conv"})
"""Ops that several parts use: the weight tells whose call it is."""

OPS_OUTSIDE = frozenset({"layer_norm", "gelu_tanh", "gelu", "attend_image"})
"""Ops of the vision tower, which is no part of a forward of the trunk."""


@dataclass(frozen=True, slots=True)
class _Call:
    phase: str
    began: Any
    ended: Any


class PhaseTimer:
    """Collects the calls of a timed trunk. Two clock readings a call; a GPU's clock is its own."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._on_gpu = gpu.in_use()

    def timed(self, phase_of: Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with its time noted under the phase that its arguments belong to."""

        def run(*args: Any, **named: Any) -> Any:
            began = self._now()
            result = call(*args, **named)
            self._calls.append(_Call(phase_of(*args), began, self._now()))
            return result

        return run

    def take(self, total_s: float) -> dict[str, float]:
        """Seconds of every phase since the last call; they sum to `total_s`."""
        calls, self._calls = self._calls, []
        gpu.settle()
        found = dict.fromkeys(PHASES, 0.0)
        before: _Call | None = None
        for call in calls:
            joined = before is not None and before.phase == call.phase
            since = before.ended if before is not None and joined else call.began
            found[call.phase] += self._between(since, call.ended)
            before = call
        found["rest"] += total_s - sum(found.values())
        return found

    def _now(self) -> Any:
        return gpu.mark() if self._on_gpu else time.perf_counter()

    def _between(self, began: Any, ended: Any) -> float:
        return gpu.seconds_between(began, ended) if self._on_gpu else float(ended - began)


class _TimedRows:
    """A `RowSource` with its calls timed; asking for rows and waiting for them are one phase."""

    def __init__(self, rows: RowSource, timer: PhaseTimer) -> None:
        def always(*_: object) -> str:
            return "ngram"

        self.begin: Callable[..., Any] = timer.timed(always, rows.begin)
        self.take: Callable[..., Any] = timer.timed(always, rows.take)
        self.prefetch: Callable[..., Any] = timer.timed(always, rows.prefetch)
        self.close: Callable[..., Any] = rows.close


def timed_trunk(trunk: Trunk, timer: PhaseTimer) -> Trunk:
    """A trunk over the same weights whose calls `timer` collects; results have the same bits."""
    return trunk.over(
        timed_ops(trunk.ops, trunk.weights, timer),
        lambda rows: _TimedRows(rows, timer),
    )


def timed_ops(ops: Ops, weights: TrunkWeights, timer: PhaseTimer) -> Ops:
    """The table with every op timed."""
    phase_of_weight = _phases_of_weights(weights)

    def by_weight(*args: Any) -> str:
        return next((phase_of_weight[id(a)] for a in args if id(a) in phase_of_weight), "rest")

    def always(phase: str) -> Callable[..., str]:
        return lambda *_: phase

    calls: dict[str, Any] = {}
    for field in fields(Ops):
        call = getattr(ops, field.name)
        if callable(call):
            phase = PHASE_OF_OP.get(field.name)
            calls[field.name] = timer.timed(always(phase) if phase else by_weight, call)
    return Ops(name=ops.name, **calls)


def _phases_of_weights(weights: TrunkWeights) -> Mapping[int, str]:
    """By identity: the trunk holds every weight for as long as it lives."""
    found: dict[int, str] = {id(weights.head): "head", id(weights.embed): "embed"}
    for block in weights.blocks:
        mixer = "gdn" if isinstance(block.mixer, GdnWeights) else "qsa"
        for part, phase in ((block.mixer, mixer), (block.moe, "moe"), (block.ple, "ple")):
            if part is not None and is_dataclass(part):
                found |= {id(getattr(part, field.name)): phase for field in fields(part)}
    return found
