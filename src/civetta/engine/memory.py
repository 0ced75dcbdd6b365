"""The memory plan: what weights, sessions and cache take, told at start, refused when it cannot fit.

Sizes of state come from the very containers that hold it, made on the meta device, so that the
plan cannot drift from the layout. Pages are counted for every session's whole context where that
fits; else for as much as fits, and requests share them (launch.py says how).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from civetta.errors import DeviceError
from civetta.kernels.ops import PAGE_TOKENS
from civetta.log import log_event
from civetta.state.pages import PagePool
from civetta.state.recurrent import RecurrentState

if TYPE_CHECKING:
    from civetta.state.session import StateShape

MARGIN_BYTES = 512 << 20
"""Left to activations, the interpreter and everything else that is not planned."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Bytes of one session's fixed state, and of one page of 64 tokens of it."""

    session_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What goes where. `weights_bytes` of `mapped` weights are the files' own pages in memory,

    which the system may drop and read again; they are told, not budgeted. `pages` are shared by
    all sessions. `cache_bytes` is the budget of kept states.
    """

    weights_bytes: int
    mapped: bool
    sizes: StateSizes
    sessions: int
    context_tokens: int
    pages: int
    cache_bytes: int
    available_bytes: int

    @property
    def whole_pages(self) -> int:
        """Pages of every session's whole context."""
        return self.sessions * pages_of(self.context_tokens)

    @property
    def total_bytes(self) -> int:
        """All that is planned."""
        weights = 0 if self.mapped else self.weights_bytes
        state = self.sessions * self.sizes.session_bytes + self.pages * self.sizes.page_bytes
        return weights + state + self.cache_bytes


def pages_of(tokens: int) -> int:
    """Pages that so many tokens need."""
    return -(-tokens // PAGE_TOKENS)


def state_sizes(shape: StateShape, dtype: torch.dtype) -> StateSizes:
    """Sizes of the state that `shape` describes; allocates nothing."""
    with torch.device("meta"):
        layers = PagePool(shape.pages, 1, dtype).layers
        state = RecurrentState(shape.recurrent, dtype)
    page = [part for la in layers for part in (la.k, la.v, la.index_raw, la.index_key)]
    fixed = [part for la in state.gdn for part in (la.s_VAA, la.k, la.v, la.log_decay, la.beta)]
    fixed += [history.tensor() for history in (*state.conv, state.ple)]
    drafts = 4 * shape.draft_width * PAGE_TOKENS  # float32 streams of the newest tokens
    return StateSizes(
        session_bytes=sum(part.nbytes for part in fixed) + drafts,
        page_bytes=sum(part.nbytes for part in page),
    )


def plan_memory(
    sizes: StateSizes,
    *,
    sessions: int,
    context_tokens: int,
    weights_bytes: int,
    mapped: bool,
    available_bytes: int,
    cache_bytes: int = 0,
) -> MemoryPlan:
    """Divide `available_bytes`. Raises DeviceError, with the numbers, when one context cannot fit."""
    weights = 0 if mapped else weights_bytes
    free = available_bytes - MARGIN_BYTES - weights - sessions * sizes.session_bytes - cache_bytes
    one = pages_of(context_tokens)
    fitting = max(free, 0) // sizes.page_bytes
    if fitting < one:
        raise DeviceError(
            f"The model does not fit: a session of {context_tokens} tokens takes"
            f" {_gb(one * sizes.page_bytes)} of keys and values, and {_gb(available_bytes)} are free"
            f" for that, for {sessions} x {_gb(sizes.session_bytes)} of state, {_gb(weights)} of"
            f" weights, {_gb(cache_bytes)} of cache and {_gb(MARGIN_BYTES)} to work with."
            + _cure(fitting, sessions)
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        mapped=mapped,
        sizes=sizes,
        sessions=sessions,
        context_tokens=context_tokens,
        pages=min(fitting, sessions * one),
        cache_bytes=cache_bytes,
        available_bytes=available_bytes,
    )


def tell(plan: MemoryPlan) -> None:
    """Log the plan, and a warning when sessions have to share pages."""
    log_event(
        _log,
        logging.INFO,
        "memory_plan",
        weights=_gb(plan.weights_bytes) + (" mapped" if plan.mapped else ""),
        session_state=_gb(plan.sizes.session_bytes),
        kv_token=f"{plan.sizes.page_bytes / PAGE_TOKENS:.0f} B",
        sessions=plan.sessions,
        context=plan.context_tokens,
        kv_pages=plan.pages,
        kv=_gb(plan.pages * plan.sizes.page_bytes),
        cache=_gb(plan.cache_bytes),
        total=_gb(plan.total_bytes),
        available=_gb(plan.available_bytes),
    )
    if plan.pages < plan.whole_pages:
        log_event(
            _log,
            logging.WARNING,
            "sessions_share_pages",
            tokens=plan.pages * PAGE_TOKENS,
            whole=plan.whole_pages * PAGE_TOKENS,
            effect="long requests at the same time may have to wait or compute state again",
            cure="fewer --sessions or a smaller --context",
        )


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory that a new process could take: the machine's, or its control group's if less.

    What the kernel does not tell counts as 1 TiB: nothing is refused for want of a number.
    """
    free = 1 << 40
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = int(value.split()[0]) * 1024
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(int(limit) - int(used), 0))
    return free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cure(fitting_pages: int, sessions: int) -> str:
    if fitting_pages:
        return f" Start with --context {fitting_pages * PAGE_TOKENS} at most."
    if sessions > 1:
        return " Start with fewer --sessions, or on a machine with more memory."
    return " Start with a smaller cache, or on a machine with more memory."


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
