"""`Guide`: what the next token of one reply may be, as thought, answer and calls come and go.

    OPENING ──> THOUGHT ──> FORCED ──> ANSWER ──> (the reply's end)
        │          │
        └──────────┴─────> FREE <──> CALL        END: only the end may follow

A guide reads the same text as `chat.reply.ReplyParser` and sees thoughts and calls where it sees
them. Where something begins behind a marker, tokens that hold the marker's end and more are ruled
out, so that a grammar always begins with a whole token. All of it follows from the reply's own
tokens: drafts, batches and restarts cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from civetta.chat.reply import THINK_CLOSE, THINK_OPEN
from civetta.chat.tools import CALL_OPEN
from civetta.decode.mask import TokenMask
from civetta.errors import ConstraintFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor, Future

    from civetta.decode.grammars import Matcher
    from civetta.decode.guide_tokens import GuideTokens
    from civetta.types import Constraint

LEAD = "\n\n"
"""What the chat template writes between a thought and the answer."""
_TAIL_BYTES = 16
"""Text that is remembered: longer than every marker, and than a character."""


class Phase(Enum):
    """What is being said."""

    OPENING = auto()  # blank text so far: the reply may open a thought by itself
    THOUGHT = auto()
    FORCED = auto()  # a fixed run of tokens
    ANSWER = auto()  # in a grammar, to the end of the reply
    FREE = auto()
    CALL = auto()  # in a grammar, to its end
    END = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Where a reply is. `then` follows the `forced` tokens; `matcher` is there in a grammar."""

    phase: Phase
    tail: bytes = b""
    thought_tokens: int = 0
    calls: int = 0
    forced: tuple[int, ...] = ()
    then: Phase = Phase.FREE
    matcher: Matcher | None = None


class Guide:
    """Masks for one reply. One thread at a time; `begin_rows` lends it to another for a while.

    `thinking`: the prompt left a thought open; it is closed after `thinking_budget` tokens, not
    within a character. `start` is a matcher at the start of the constraint's grammar. With `ends`
    False end tokens are tokens like any other.
    """

    def __init__(
        self,
        tokens: GuideTokens,
        *,
        thinking: bool = False,
        thinking_budget: int | None = None,
        constraint: Constraint | None = None,
        start: Matcher | None = None,
        ends: bool = True,
    ) -> None:
        assert (constraint is None) == (start is None), "a constraint has a compiled grammar"
        self._tokens, self._budget = tokens, thinking_budget
        self._start = start
        self._end_ids = tokens.end_ids if ends else frozenset()
        self._answer = constraint is not None and constraint.starts == "answer"
        self._call = constraint is not None and constraint.starts == "call"
        self._calls_max = None if constraint is None else constraint.calls_max
        self._pending: tuple[tuple[int, ...], Future[list[TokenMask | None]]] | None = None
        if thinking:
            self._state = self._thought(_State(phase=Phase.THOUGHT), b"")
        elif self._answer:
            self._state = self._entered(_State(phase=Phase.FREE), Phase.ANSWER)
        else:
            self._state = _State(phase=Phase.OPENING)

    @property
    def phase(self) -> Phase:
        """Where the reply is."""
        return self._state.phase

    def rows(self, draft_ids: Sequence[int] = ()) -> list[TokenMask | None]:
        """Masks of the next token and of the ones behind each draft that fits; None: no bounds.

        The list is shorter than 1 + drafts when a draft does not fit, or is an end token. Raises
        ConstraintFailed.
        """
        wanted = tuple(draft_ids)
        if self._pending is not None:
            ids, future = self._pending
            self._pending = None
            masks = future.result()
            if ids == wanted:
                return masks
        return self._rows(wanted)

    def begin_rows(self, draft_ids: Sequence[int], executor: Executor) -> None:
        """Let another thread compute what `rows` with the same drafts will be asked for."""
        self._settle()
        ids = tuple(draft_ids)
        self._pending = ids, executor.submit(self._rows, ids)

    def fitting(self, draft_ids: Sequence[int]) -> int:
        """How many of the drafts, from the first on, the grammar does not rule out. Cheap."""
        self._settle()
        return self._ahead(draft_ids, None)

    def advance(self, token_id: int) -> None:
        """Go on by a token of the reply, which is not an end token. Raises ConstraintFailed."""
        self._settle()
        state = self._after(self._state, token_id)
        if state is None:
            raise ConstraintFailed("The reply left its grammar, which must not happen: report it.")
        self._state = state

    # ---- looking ahead -------------------------------------------------------------------------

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending[1].exception()  # waits; whoever asks for the rows again meets it again

    def _rows(self, draft_ids: Sequence[int]) -> list[TokenMask | None]:
        masks: list[TokenMask | None] = []
        self._ahead(draft_ids, masks)
        return masks

    def _ahead(self, draft_ids: Sequence[int], masks: list[TokenMask | None] | None) -> int:
        """Go along the drafts and back; how many fit. Collects masks in `masks`."""
        state, own, taken, fitting = self._state, self._state.matcher, 0, 0
        try:
            if masks is not None:
                masks.append(self._mask(state))
            for token_id in draft_ids:
                if token_id in self._end_ids:
                    return fitting + self._may_end(state)
                after = self._after(state, token_id)
                if after is None:
                    break
                taken += own is not None and state.matcher is own
                state, fitting = after, fitting + 1
                if masks is not None:
                    masks.append(self._mask(state))
            return fitting
        finally:
            if own is not None and taken:
                own.back(taken)

    def _may_end(self, state: _State) -> bool:
        if state.matcher is not None:
            return state.phase is Phase.ANSWER and state.matcher.accepting
        return state.phase is not Phase.FORCED and not self._in_held_thought(state)

    def _in_held_thought(self, state: _State) -> bool:
        """Whether the reply may not end here because its answer is still owed."""
        return state.phase is Phase.THOUGHT and self._answer

    # ---- the state machine ---------------------------------------------------------------------

    def _mask(self, state: _State) -> TokenMask | None:
        tokens = self._tokens
        if state.phase is Phase.FORCED:
            return TokenMask(allowed_N=np.array(state.forced[:1], np.int64))
        if state.phase is Phase.END:
            return TokenMask(allowed_N=tokens.end_ids_N)
        if state.matcher is not None:
            allowed_V = state.matcher.allowed()
            if not allowed_V.any():
                raise ConstraintFailed("The reply's grammar has no next token here: report it.")
            return TokenMask.of(allowed_V)
        banned_N = tokens.crossing(self._marker(state.phase), state.tail)
        if self._in_held_thought(state):
            banned_N = np.concatenate([banned_N, tokens.end_ids_N])
        return TokenMask(banned_N=banned_N) if len(banned_N) else None

    def _marker(self, phase: Phase) -> str | None:
        """The marker behind which a grammar begins, or would."""
        if phase is Phase.THOUGHT:
            return THINK_CLOSE if self._answer else None
        return CALL_OPEN if self._call else None

    def _after(self, state: _State, token_id: int) -> _State | None:
        """The state behind a token; None when it may not come here."""
        if state.phase is Phase.FORCED:
            if token_id != state.forced[0]:
                return None
            left = replace(state, forced=state.forced[1:])
            return left if left.forced else self._entered(left, state.then)
        if state.phase is Phase.END:
            return None
        if state.matcher is not None:
            return self._within(state, state.matcher, token_id)
        text = self._tokens.text(token_id)
        if state.phase is Phase.THOUGHT:
            return self._thought(replace(state, thought_tokens=state.thought_tokens + 1), text)
        if state.phase is Phase.OPENING:
            return self._opening(state, text)
        return self._free(state, text)

    def _within(self, state: _State, matcher: Matcher, token_id: int) -> _State | None:
        if not matcher.take(token_id):
            return None
        if state.phase is Phase.ANSWER or not matcher.accepting:
            return state
        calls = state.calls + 1
        over = self._calls_max is not None and calls >= self._calls_max
        return _State(phase=Phase.END if over else Phase.FREE, calls=calls)

    def _opening(self, state: _State, text: bytes) -> _State:
        tail = state.tail + text
        word = tail.decode("utf-8", "ignore").lstrip()
        if word.startswith(THINK_OPEN):
            rest = word[len(THINK_OPEN) :].encode()
            return self._thought(_State(phase=Phase.THOUGHT, calls=state.calls), rest)
        if THINK_OPEN.startswith(word):
            return replace(state, tail=word.encode())
        return self._free(replace(state, phase=Phase.FREE), text)

    def _thought(self, state: _State, text: bytes) -> _State:
        tail = state.tail + text
        _, marker, behind = tail.partition(THINK_CLOSE.encode())
        if marker:
            return self._answering(replace(state, tail=b""), behind)
        state = replace(state, tail=tail[-_TAIL_BYTES:])
        spent = self._budget is not None and state.thought_tokens >= self._budget
        whole = _ends_whole(state.tail) or state.thought_tokens >= (self._budget or 0) + 4
        if not spent or not whole:
            return state
        close = self._tokens.close_ids if state.tail.endswith(b"\n") else self._tokens.break_ids
        then = Phase.ANSWER if self._answer else Phase.FREE
        forced = (*close, *self._tokens.lead_ids)
        return replace(state, phase=Phase.FORCED, forced=forced, then=then, tail=b"")

    def _answering(self, state: _State, behind: bytes) -> _State:
        """The state behind a thought that the reply closed itself."""
        if self._answer:
            forced = self._tokens.lead_ids
            return replace(state, phase=Phase.FORCED, forced=forced, then=Phase.ANSWER)
        return self._free(replace(state, phase=Phase.FREE), behind)

    def _free(self, state: _State, text: bytes) -> _State:
        if not self._call:
            return replace(state, tail=b"")
        tail = state.tail + text
        if CALL_OPEN.encode() in tail:
            return self._entered(replace(state, tail=b""), Phase.CALL)
        return replace(state, tail=tail[-_TAIL_BYTES:])

    def _entered(self, state: _State, phase: Phase) -> _State:
        if phase not in (Phase.ANSWER, Phase.CALL):
            return replace(state, phase=phase)
        assert self._start is not None, "a grammar's phase has a grammar"
        return replace(state, phase=phase, matcher=self._start.copy())


def _ends_whole(tail: bytes) -> bool:
    """Whether the text does not end within a character."""
    for size in range(1, min(4, len(tail)) + 1):
        byte = tail[-size]
        if byte < 0x80:
            return True
        if byte >= 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return size >= need
    return True
