"""The memory plan: what weights, sessions and cache take, told at start, refused when it cannot fit.

Sizes of state come from the very containers that hold it, made on the meta device, so that the
plan cannot drift from the layout. Pages are counted for every session's whole context where that
fits; else for as much as fits, and requests share them (launch.py says how).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from civetta.errors import DeviceError
from civetta.kernels.ops import PAGE_TOKENS
from civetta.log import log_event
from civetta.state.device_state import DeviceLayout
from civetta.state.drafts import MOST_KEPT
from civetta.state.pages import PagePool
from civetta.state.recurrent import RecurrentState

if TYPE_CHECKING:
    from civetta.state.session import StateShape

MARGIN_BYTES = 512 << 20
"""Left to the interpreter, allocators and everything else that is not planned."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Bytes of one session's fixed state, and of one page of 64 tokens of it."""

    session_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What a model and its sessions take.

    Weights that are not yet in memory are `planned`. `mapped` ones are the files' own pages, which
    the system may drop and read again, and `loaded` ones are in memory before what is available was
    measured: both are told, not budgeted. `images_bytes` is what images will bring in: the tower's
    weights where they are not mapped, what it computes with, and the rows that are kept.
    `launch_bytes` is what the largest launch allocates on a GPU; on a CPU the margin holds it.
    """

    sizes: StateSizes
    sessions: int
    context_tokens: int
    weights_bytes: int = 0
    weights: Literal["planned", "mapped", "loaded"] = "planned"
    images_bytes: int = 0
    launch_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Weights that are budgeted, room for images and launches, every session's fixed state."""
        state_bytes = self.sessions * self.sizes.session_bytes
        room_bytes = self.images_bytes + self.launch_bytes
        return self.budgeted_weights_bytes + room_bytes + state_bytes

    @property
    def budgeted_weights_bytes(self) -> int:
        """Weights that have to find room yet."""
        return self.weights_bytes if self.weights == "planned" else 0

    @property
    def whole_pages(self) -> int:
        """Pages of every session's whole context."""
        return self.sessions * pages_of(self.context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Who gets what: `pages` are shared by all sessions; `cache_bytes` is for kept states."""

    needs: MemoryNeeds
    pages: int
    cache_bytes: int
    available_bytes: int

    @property
    def left_bytes(self) -> int:
        """What is not planned for anything."""
        return self.available_bytes - MARGIN_BYTES - self.total_bytes

    @property
    def total_bytes(self) -> int:
        """All that is planned."""
        pages = self.pages * self.needs.sizes.page_bytes
        return self.needs.fixed_bytes + pages + self.cache_bytes


def pages_of(tokens: int) -> int:
    """Pages that so many tokens need."""
    return -(-tokens // PAGE_TOKENS)


def state_sizes(shape: StateShape, dtype: torch.dtype) -> StateSizes:
    """Sizes of the state that `shape` describes; allocates nothing."""
    with torch.device("meta"):
        layers = PagePool(shape.pages, 1, dtype).layers
    page = [part for la in layers for part in (la.k, la.v, la.index_raw, la.index_key)]
    drafts = 4 * shape.draft_width * MOST_KEPT  # float32 streams of the newest tokens
    return StateSizes(
        session_bytes=_recurrent_bytes(shape, dtype) + drafts,
        page_bytes=sum(part.nbytes for part in page),
    )


def _recurrent_bytes(shape: StateShape, dtype: torch.dtype) -> int:
    if shape.addressed:
        return DeviceLayout(shape.recurrent, dtype).nbytes
    with torch.device("meta"):
        state = RecurrentState(shape.recurrent, dtype)
    fixed = [part for la in state.gdn for part in (la.s_VAA, la.k, la.v, la.log_decay, la.beta)]
    fixed += [history.tensor() for history in (*state.conv, state.ple)]
    return sum(part.nbytes for part in fixed)


def plan_memory(needs: MemoryNeeds, *, available_bytes: int, cache_bytes: int = 0) -> MemoryPlan:
    """Divide `available_bytes`. Raises DeviceError, with the numbers, when one context cannot fit."""
    page_bytes = needs.sizes.page_bytes
    free = available_bytes - MARGIN_BYTES - needs.fixed_bytes - cache_bytes
    one = pages_of(needs.context_tokens)
    fitting = max(free, 0) // page_bytes
    if fitting < one:
        raise DeviceError(
            f"The model does not fit: a session of {needs.context_tokens} tokens takes"
            f" {_gb(one * page_bytes)} of keys and values, and {_gb(available_bytes)} are free"
            f" for that, for {needs.sessions} x {_gb(needs.sizes.session_bytes)} of state,"
            f" {_gb(needs.budgeted_weights_bytes)} of weights, {_gb(needs.images_bytes)} for images,"
            f" {_gb(cache_bytes)} of cache and {_gb(MARGIN_BYTES + needs.launch_bytes)} to work with."
            + _cure(fitting, needs.sessions, left_bytes=free + cache_bytes - one * page_bytes)
        )
    return MemoryPlan(
        needs=needs,
        pages=min(fitting, needs.whole_pages),
        cache_bytes=cache_bytes,
        available_bytes=available_bytes,
    )


def tell(plan: MemoryPlan) -> None:
    """Log the plan, and a warning when sessions have to share pages."""
    needs = plan.needs
    log_event(
        _log,
        logging.INFO,
        "memory_plan",
        weights=f"{_gb(needs.weights_bytes)} {needs.weights}",
        images=_gb(needs.images_bytes),
        launch=_gb(needs.launch_bytes),
        session_state=_gb(needs.sizes.session_bytes),
        kv_token=f"{needs.sizes.page_bytes / PAGE_TOKENS:.0f} B",
        sessions=needs.sessions,
        context=needs.context_tokens,
        kv_pages=plan.pages,
        kv=_gb(plan.pages * needs.sizes.page_bytes),
        cache=_gb(plan.cache_bytes),
        total=_gb(plan.total_bytes),
        available=_gb(plan.available_bytes),
    )
    if plan.pages < needs.whole_pages:
        log_event(
            _log,
            logging.WARNING,
            "sessions_share_pages",
            tokens=plan.pages * PAGE_TOKENS,
            whole=needs.whole_pages * PAGE_TOKENS,
            effect="long requests at the same time may have to wait or compute state again",
            cure="fewer --sessions or a smaller --context",
        )


def _cure(fitting_pages: int, sessions: int, *, left_bytes: int) -> str:
    """What to change; `left_bytes`: what one context without any cache would leave."""
    if fitting_pages:
        return f" Start with --context {fitting_pages * PAGE_TOKENS} at most."
    if left_bytes >= 0:
        return f" Start with --cache-ram-bytes {left_bytes} at most."
    if sessions > 1:
        return " Start with fewer --sessions, or on a machine with more memory."
    return " Start on a machine with more memory."


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
