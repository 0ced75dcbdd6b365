"""`DraftedReplies`: decoding with drafts, through the engine's own step loop.

A case's sessions are the replies of one loop. Each goes on from the state that its stream has at
the case's depth, generates greedily, and drafts as the engine would: lengths adapt from one
repetition to the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.cache.off import NoCache, NoRestore
from civetta.cache.protocol import RestorePoint, Tier
from civetta.cache.restore import RamRestore
from civetta.decode.stream import TokenText
from civetta.engine.loop import LoopLimits, StepLoop
from civetta.engine.outbox import OutboxStream
from civetta.engine.protocol import Finished, GenerateRequest, TokenEvent
from civetta.engine.scheduler import Budget
from civetta.engine.trunk_model import TrunkModel
from civetta.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.bench.case import Case
    from civetta.cache.protocol import ImageMark
    from civetta.engine.outbox import Outbox
    from civetta.engine.speculation import Drafting
    from civetta.model.trunk import Trunk
    from civetta.state.session import Session, SessionStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """One repetition: ids [tokens] of each session, and what became of the drafts."""

    seconds: float
    ids: list[list[int]]
    drafts: int
    accepted: int


class DraftedReplies:
    """The loop of one case. `deep` are sessions at the case's depth; they stay as they are."""

    def __init__(
        self,
        case: Case,
        trunk: Trunk,
        drafting: Drafting,
        *,
        store: SessionStore,
        deep: Sequence[Session],
        streams: Sequence[Sequence[int]],
    ) -> None:
        self._case = case
        self._prompts = [tuple(stream[: case.depth + 1]) for stream in streams]
        self._loop = StepLoop(
            TrunkModel(trunk, store),
            LoopLimits(
                budget=Budget(
                    sessions=case.sessions,
                    prefill_batch=case.sessions,  # each prompt's last token, in one launch
                    prefill_chunk=case.sessions,
                ),
                max_pending=0,
                context_tokens=store.context_tokens,
                max_text_bytes=1,
                max_unread=4 * case.tokens + 64,
                end_ids=frozenset(),
            ),
            new_text=lambda _: TokenText(None),
            cache=_Begun(dict(zip(self._prompts, deep, strict=True)), case.depth),
            drafting=drafting,
        )

    def run(self) -> Drafted:
        """Generate; the time begins when every session has its state. Raises what a reply raises."""
        boxes = [self._loop.submit(self._request(prompt))[1] for prompt in self._prompts]
        self._loop.step()  # opens the sessions, computes nothing
        began_s = time.perf_counter()
        while self._loop.stats().running:
            self._loop.step()
        seconds = time.perf_counter() - began_s
        read = [_read(box) for box in boxes]
        return Drafted(
            seconds=seconds,
            ids=[ids for ids, _ in read],
            drafts=sum(end.usage.draft_tokens for _, end in read),
            accepted=sum(end.usage.draft_tokens_accepted for _, end in read),
        )

    def _request(self, prompt: tuple[int, ...]) -> GenerateRequest:
        return GenerateRequest(
            request_id="bench",
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0),
            max_tokens=self._case.tokens,
            ignore_eos=True,
        )


class _Begun(NoCache):
    """Gives each prompt the state of the session that has all of it but the last token."""

    def __init__(self, deep: dict[tuple[int, ...], Session], depth: int) -> None:
        self._snapshots = {} if not depth else {p: s.snapshot() for p, s in deep.items()}
        self._prompts = list(self._snapshots)
        self._depth = depth

    def find(self, tokens: Sequence[int], images: Sequence[ImageMark] = ()) -> RestorePoint:
        """The state of a prompt; none at depth 0."""
        if not self._depth:
            return super().find(tokens, images)
        entry = self._prompts.index(tuple(tokens))
        return RestorePoint(cached_tokens=self._depth, tier=Tier.RAM, entry=entry)

    def begin(self, point: RestorePoint, session: Session) -> NoRestore | RamRestore:  # type: ignore[override]  # both are a Restore
        """Fill a session."""
        if point.entry is None:
            return NoRestore()
        session.restore(self._snapshots[self._prompts[point.entry]])
        return RamRestore(self._depth)


def _read(box: Outbox) -> tuple[list[int], Finished]:
    events = list(OutboxStream(box, lambda: None))
    end = events[-1]
    assert isinstance(end, Finished), "a reply that ended without its end"
    return [event.token_id for event in events if isinstance(event, TokenEvent)], end
