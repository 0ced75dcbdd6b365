"""What a launch and a draft step take on this machine, measured at the start in a blink."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from civetta.decode.lengths import Measured
from civetta.model.inputs import Piece

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.model.trunk import Trunk
    from civetta.state.session import Session

SIZES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 8))
"""Sessions and rows of the launches that are timed."""
STEPS = ((1, 1), (3, 3), (3, 6))
"""Draft steps and step rows."""
REPEATS = 3
PROMPT = 16
MOST_SECONDS = 3.0
"""A machine too slow to finish in this time is calibrated by what it managed."""


def calibrate(
    trunk: Trunk, clock: Callable[[], float] = time.perf_counter
) -> tuple[tuple[Measured, ...], tuple[Measured, ...]]:
    """Launches and draft steps, the fastest of a few; steps are empty without a head."""
    store = trunk.store(sessions=2, context_tokens=128)
    sessions = [store.open() for _ in range(2)]
    for session in sessions:
        trunk.forward(session, list(range(1, PROMPT + 1)), "none")
    _launch(trunk, sessions[:1], 8, clock)  # what is loaded on first use is no cost of a launch
    end_s = clock() + MOST_SECONDS
    launches = _fastest(
        SIZES, lambda size: _launch(trunk, sessions[: size[0]], size[1], clock), clock, end_s
    )
    steps: tuple[Measured, ...] = ()
    if trunk.head is not None:
        steps = _fastest(
            STEPS,
            lambda size: _draft(trunk, sessions[: size[1] // size[0]], size[0], clock),
            clock,
            end_s,
        )
    for session in sessions:
        session.close()
    return launches, steps


def _fastest(
    sizes: tuple[tuple[int, int], ...],
    once: Callable[[tuple[int, int]], float],
    clock: Callable[[], float],
    end_s: float,
) -> tuple[Measured, ...]:
    best: dict[tuple[int, int], float] = {}
    for _ in range(REPEATS):
        for size in sizes:
            if best and clock() > end_s:
                break
            best[size] = min(once(size), best.get(size, float("inf")))
    return tuple(Measured(sessions=a, rows=b, seconds=s) for (a, b), s in best.items())


def _launch(trunk: Trunk, sessions: list[Session], rows: int, clock: Callable[[], float]) -> float:
    share = rows // len(sessions)
    began_s = clock()
    logits = trunk.forward_pieces(
        [Piece(session=session, ids=range(1, share + 1), rows="all") for session in sessions]
    )
    logits.float().cpu().numpy()
    seconds = clock() - began_s
    for session in sessions:
        session.rewind(share)
    return seconds


def _draft(trunk: Trunk, sessions: list[Session], steps: int, clock: Callable[[], float]) -> float:
    assert trunk.head is not None
    for session in sessions:
        session.reserve(1 + steps)
    began_s = clock()
    logits_BV, chain = trunk.head.begin(sessions, [1] * len(sessions))
    for _ in range(steps - 1):
        logits_BV, chain = trunk.head.extend(chain, [1] * len(sessions))
    logits_BV.topk(min(64, logits_BV.shape[1]), dim=-1).values.cpu().numpy()
    seconds = clock() - began_s
    for session in sessions:
        session.trim()
    return seconds
