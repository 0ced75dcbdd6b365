"""Step loops in one thread that take steps in turn, so that a busy machine slows all alike.

The one that is behind in tokens takes the next step; all answer the same requests, one batch of
users after another. Time is that of decoding rounds, cut into stretches of so many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from civetta.decode.stream import TokenText
from civetta.engine.loop import LoopLimits, StepLoop
from civetta.engine.outbox import OutboxStream
from civetta.engine.protocol import Finished, TokenEvent
from civetta.engine.scheduler import Budget
from civetta.engine.trunk_model import TrunkModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from civetta.engine.protocol import EngineStats, GenerateRequest
    from civetta.engine.speculation import Drafting
    from civetta.model.trunk import Trunk
    from civetta.model.vision_build import LazyTower


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Seconds [stretches, 2] of decoding, without drafts and with; token ids of the replies."""

    seconds_N2: np.ndarray
    tokens: int
    replies: list[list[int]]
    stats: EngineStats

    @property
    def ratio(self) -> float:
        """Rate with drafts over rate without."""
        off_s, on_s = self.seconds_N2.sum(axis=0)
        return float(off_s / on_s)

    def interval(self) -> tuple[float, float]:
        """Where the ratio lies 19 times of 20, stretches drawn again at random."""
        random = np.random.default_rng(0)
        drawn_RN = random.integers(0, len(self.seconds_N2), (4000, len(self.seconds_N2)))
        off_R, on_R = self.seconds_N2[drawn_RN].sum(axis=1).T
        low, high = np.quantile(off_R / on_R, (0.025, 0.975))
        return float(low), float(high)


def take_turns(
    loops: tuple[StepLoop, StepLoop],
    users: int,
    requests: Sequence[GenerateRequest],
    *,
    stretch: int = 64,
) -> Turns:
    """Answer `requests`, `users` at a time, with both loops, of which the first is the measure.

    Fails if a reply differs. A stretch of the time is that of `stretch` tokens at the least.
    """
    marks = [_decode_s(loops)]
    begun = [loop.stats().generated_tokens_total for loop in loops]
    replies: list[list[list[int]]] = [[] for _ in loops]

    def mark() -> None:
        totals = [loop.stats().generated_tokens_total for loop in loops]
        if min(t - b for t, b in zip(totals, begun, strict=True)) >= stretch * len(marks):
            marks.append(_decode_s(loops))

    for first in range(0, len(requests), users):
        batch = requests[first : first + users]
        answered = answer(loops, batch, after=mark)
        replies = [[*said, *more] for said, more in zip(replies, answered, strict=True)]
    marks.append(_decode_s(loops))
    seconds_N2 = np.diff(np.array(marks), axis=0)
    off, on = loops
    return Turns(
        seconds_N2=seconds_N2[seconds_N2.min(axis=1) > 0],
        tokens=off.stats().generated_tokens_total - begun[0],
        replies=replies[0],
        stats=on.stats(),
    )


def answer(
    loops: Sequence[StepLoop],
    batch: Sequence[GenerateRequest],
    *,
    after: Callable[[], None] = lambda: None,
) -> list[list[list[int]]]:
    """Token ids of the replies to `batch`, all at a time, a list a loop; fails if a reply differs.

    Of loops that are equally far, the first takes the next step; `after` is called behind each step.
    """
    boxes = [[loop.submit(request)[1] for request in batch] for loop in loops]
    begun = [loop.stats().generated_tokens_total for loop in loops]
    while True:
        behind = [
            (now.generated_tokens_total - b, place)
            for place, (now, b) in enumerate(zip([x.stats() for x in loops], begun, strict=True))
            if now.running + now.waiting
        ]
        if not behind:
            break
        loops[min(behind)[1]].step()
        after()
    replies = [[_ids(box) for box in own] for own in boxes]
    assert all(own == replies[0] for own in replies), "the loops say different things"
    return replies


def step_loop(
    trunk: Trunk,
    drafting: Drafting | None,
    *,
    users: int,
    context: int,
    clock: Callable[[], float],
    tower: LazyTower | None = None,
) -> StepLoop:
    """An engine's loop without its thread, for a caller that takes the steps; texts are left out."""
    return StepLoop(
        TrunkModel(trunk, trunk.store(sessions=users, context_tokens=context), tower),
        LoopLimits(
            budget=Budget(sessions=users, prefill_batch=context, prefill_chunk=context),
            max_pending=1000,
            context_tokens=context,
            max_text_bytes=1,
            max_unread=1 << 20,
            end_ids=frozenset(),
        ),
        new_text=lambda _: TokenText(None),
        clock=clock,
        drafting=drafting,
    )


def _decode_s(loops: Sequence[StepLoop]) -> list[float]:
    return [loop.stats().decode_s_total for loop in loops]


def _ids(box) -> list[int]:  # type: ignore[no-untyped-def]
    events = list(OutboxStream(box, lambda: None))
    assert isinstance(events[-1], Finished), "a reply that ended without its end"
    return [event.token_id for event in events if isinstance(event, TokenEvent)]
