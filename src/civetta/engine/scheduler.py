"""What the next step does: a pure function of who waits, who runs and what fits.

No torch, no clock, no threads. The loop carries out whatever `plan` returns.

Every due decoder gets a token a step, so the gap between a reply's tokens is one round and one
prefill of at most `prefill_chunk` tokens, however long the prompt. With nobody decoding a step
prefills `prefill_batch` tokens. The tokens of a step go to the client that was given least so far,
within a client to the request that waited longest for its turn, and what it does not need to
the next one: short prompts share a launch, and a short prompt never waits for the end of a long one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A queued request; first in the list is first in the queue (shares.QueueTickets).

    `pages`: what its sequence needs, and a page to go on.
    """

    key: int
    pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An admitted request; prompt_left 0 means that it decodes, unless it is still `restoring`.

    `pages`: what it holds, or needs for its prompt, whichever is more.
    `client_served`: prompt tokens its client was given (shares.PrefillShares); `turn`: the step
    that last gave it prompt tokens, or that admitted it. `at_once`: prompt tokens of it that one
    step may compute.
    """

    key: int
    prompt_left: int
    client_id: str = ""
    client_served: int = 0
    turn: int = 0
    pages: int = 0
    restoring: bool = False
    at_once: int = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Sessions at a time, prompt tokens a step (alone, and while somebody decodes), pages."""

    sessions: int
    prefill_batch: int
    prefill_chunk: int
    pages: int = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """The next n_tokens > 0 prompt tokens of one request."""

    key: int
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step: admit these, one token for those, then these prompt chunks in one launch."""

    admit: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()


def plan(waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
    """Choose the work of one step. Newly admitted requests get work from the next step on."""
    active = [request for request in running if not request.restoring]
    decode = tuple(request.key for request in active if request.prompt_left == 0)
    limit = budget.prefill_chunk if decode else budget.prefill_batch
    return Plan(
        admit=_admitted(waiting, running, budget),
        decode=decode,
        prefill=_chunks([request for request in active if request.prompt_left > 0], limit),
    )


def after(running: Sequence[Running], done: Plan, *, step: int) -> list[Running]:
    """Those who run as they will be when `done` is carried out in `step`, should nobody end."""
    given = {chunk.key: chunk.n_tokens for chunk in done.prefill}
    served: Counter[str] = Counter()
    for request in running:
        served[request.client_id] += given.get(request.key, 0)
    return [
        replace(
            request,
            prompt_left=request.prompt_left - given.get(request.key, 0),
            client_served=request.client_served + served[request.client_id],
            turn=step if request.key in given else request.turn,
        )
        for request in running
    ]


def _admitted(
    waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget
) -> tuple[int, ...]:
    """The queue's front, as far as sessions and pages reach; nobody overtakes for being smaller.

    With nothing running the first goes in whatever it needs: it gets all there is, or is told
    what is missing.
    """
    sessions = budget.sessions - len(running)
    pages = budget.pages - sum(request.pages for request in running)
    admit: list[int] = []
    for request in waiting:
        nothing_runs = not running and not admit
        if len(admit) >= sessions or (request.pages > pages and not nothing_runs):
            break
        admit.append(request.key)
        pages -= request.pages
    return tuple(admit)


def _chunks(prefilling: Sequence[Running], limit: int) -> tuple[PrefillChunk, ...]:
    """Deal `limit` tokens out, a chunk a request, in order of who is owed most."""
    order = sorted(prefilling, key=lambda r: (r.client_served, r.turn, r.prompt_left, r.key))
    chunks = []
    for request in order:
        n_tokens = min(limit, request.prompt_left, request.at_once)
        if n_tokens:
            chunks.append(PrefillChunk(key=request.key, n_tokens=n_tokens))
            limit -= n_tokens
    return tuple(chunks)
