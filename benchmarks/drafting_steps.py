"""What a launch of several rows, a draft step and a catch-up take, and at which acceptance drafts pay.

Medians of repeats on one session; every id that the engine would read is read by the host.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from civetta.state.drafts import MOST_LAG

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.model.trunk import Trunk
    from civetta.state.session import Session

PROMPT = 100


def step_report(trunk: Trunk, clock: Callable[[], float], repeats: int = 15) -> dict[str, Any]:
    """Milliseconds of launches of 1 to 8 rows and of 1 to 7 drafts; acceptance at which those pay."""
    store = trunk.store(sessions=1, context_tokens=PROMPT + MOST_LAG + 32)
    session = store.open()
    trunk.forward(session, list(range(1, PROMPT + 1)), "none")

    def median_s(once: Callable[[], float], before: Callable[[], None]) -> float:
        for _ in range(3):  # compiles, captures, replays
            before()
            once()
        seconds = []
        for _ in range(repeats):
            before()
            seconds.append(once())
        return statistics.median(seconds)

    def caught_up() -> None:
        assert trunk.head is not None
        trunk.head.catch_up([session])

    launch_s = {
        n: median_s(lambda n=n: launch_s_of(trunk, session, n, clock), caught_up)
        for n in range(1, 9)
    }
    draft_s = {
        n: median_s(lambda n=n: draft_s_of(trunk, session, n, clock), caught_up)
        for n in range(1, 8)
    }
    return {
        "launch_ms": _ms(launch_s),
        "draft_ms": _ms(draft_s),
        "break_even_acceptance": {
            n: break_even((launch_s[1 + n] + draft_s[n]) / launch_s[1] - 1, n) for n in draft_s
        },
    }


def break_even(tokens: float, n: int) -> float | None:
    """p with p + p^2 + ... + p^n = tokens; None when even p = 1 does not reach it."""
    grid = np.linspace(0, 1, 1001)
    total = sum(grid**k for k in range(1, n + 1))
    enough = np.flatnonzero(total >= tokens)
    return round(float(grid[enough[0]]), 3) if len(enough) else None


def launch_s_of(trunk: Trunk, session: Session, rows: int, clock: Callable[[], float]) -> float:
    """Seconds of a launch whose logits are read."""
    settle(trunk)
    began_s = clock()
    trunk.forward(session, range(1, rows + 1), "all").argmax(-1).tolist()
    settle(trunk)
    seconds = clock() - began_s
    session.rewind(rows)
    return seconds


def draft_s_of(trunk: Trunk, session: Session, n: int, clock: Callable[[], float]) -> float:
    """Seconds of drawing `n` drafts, each read before the next."""
    head = trunk.head
    assert head is not None
    session.reserve(1 + n)
    settle(trunk)
    began_s = clock()
    logits_BV, chain = head.begin([session], [1])
    for _ in range(n - 1):
        logits_BV, chain = head.extend(chain, logits_BV.argmax(-1).tolist())
    logits_BV.argmax(-1).tolist()
    settle(trunk)
    seconds = clock() - began_s
    session.trim()
    return seconds


def settle(trunk: Trunk) -> None:
    """Wait for the device."""
    if trunk.device.type == "cuda":
        torch.cuda.synchronize()


def _ms(seconds: dict[int, float]) -> dict[int, float]:
    return {n: round(s * 1e3, 3) for n, s in seconds.items()}
