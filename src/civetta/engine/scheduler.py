"""What the next step does: a pure function of who waits, who runs and what fits.

No torch, no clock, no threads. The loop carries out whatever `plan` returns, for any number of
sessions; a better policy replaces this file alone.

The policy: first come, first served. Every decoder gets one token a step. One request prefills at
a time, the one admitted first, in chunks of `prefill_batch` tokens, or of `prefill_chunk` while
somebody decodes, which bounds the gap between the tokens of a reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A queued request, in order of arrival."""

    key: int
    prompt_tokens: int
    client_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An admitted request, in order of admission; prompt_left 0 means that it decodes."""

    key: int
    prompt_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Sessions at a time, and prompt tokens a step: alone, and while somebody decodes."""

    sessions: int
    prefill_batch: int
    prefill_chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """The next n_tokens > 0 prompt tokens of one request."""

    key: int
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step: admit these, one token for those, then these prompt chunks."""

    admit: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()


def plan(waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
    """Choose the work of one step. Newly admitted requests get work from the next step on."""
    free = max(0, budget.sessions - len(running))
    decode = tuple(request.key for request in running if request.prompt_left == 0)
    limit = budget.prefill_chunk if decode else budget.prefill_batch
    first = next((request for request in running if request.prompt_left > 0), None)
    prefill: tuple[PrefillChunk, ...] = ()
    if first is not None:
        prefill = (PrefillChunk(key=first.key, n_tokens=min(limit, first.prompt_left)),)
    return Plan(
        admit=tuple(request.key for request in waiting[:free]), decode=decode, prefill=prefill
    )
