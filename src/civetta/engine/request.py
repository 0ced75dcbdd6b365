"""`Request`: one generation from submission to its end; its states and the legal moves.

    queued ──> restoring ──> prefilling ──> decoding ──> finished
     │ └───<──────┴─────<────────┴───────<──────┘ (put back: its state had to go)
     └────────────┴──────────────┴──────────────┴──────> cancelled | failed

A request that was put back computes its prompt and the tokens generated so far again; what
follows is the same, since a token computed in a prefill and one decoded are the same row.

The step thread moves it; any thread may ask for cancellation. No clock and no torch here: times
are arguments, in seconds of whatever clock the caller keeps.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from civetta.decode.limits import MAX_LOGPROBS
from civetta.engine.protocol import RequestView
from civetta.errors import ContextOverflow, RequestInvalid
from civetta.types import CacheSaving, CancelCause, Usage

if TYPE_CHECKING:
    from civetta.engine.protocol import GenerateRequest


class RequestState(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    RESTORING = "restoring"  # stored state is being read; other requests go on
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        """Nothing happens to the request any more."""
        return not LEGAL_MOVES[self]


_BROKEN_OFF = frozenset({RequestState.CANCELLED, RequestState.FAILED})
_STOPPED = _BROKEN_OFF | {RequestState.QUEUED}
LEGAL_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: _BROKEN_OFF | {RequestState.RESTORING},
    RequestState.RESTORING: _STOPPED | {RequestState.PREFILLING},
    RequestState.PREFILLING: _STOPPED | {RequestState.DECODING},
    RequestState.DECODING: _STOPPED | {RequestState.FINISHED},
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
}


def check_request(spec: GenerateRequest, *, vocab_size: int, context_tokens: int) -> None:
    """Refuse what cannot run, before it is queued. Sampling ranges are checked by `decode.limits`.

    Prompt and reply share the context, so a prompt must leave room for one token at least.
    Raises RequestInvalid or ContextOverflow.
    """
    if not spec.prompt_ids:
        raise RequestInvalid(
            "The prompt is empty; send at least one token of text.", param="prompt"
        )
    low, high = min(spec.prompt_ids), max(spec.prompt_ids)
    if low < 0 or high >= vocab_size:
        raise RequestInvalid(
            f"Token id {low if low < 0 else high} is not in the vocabulary; ids go from 0 to"
            f" {vocab_size - 1}.",
            param="prompt",
        )
    for token_id, _ in spec.sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise RequestInvalid(
                f"logit_bias has the token id {token_id}; ids go from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
    _check_images(spec)
    if spec.max_tokens is not None and spec.max_tokens < 0:
        raise RequestInvalid(
            f"max_tokens is {spec.max_tokens}; give at least 0, or leave it out to generate until"
            " the reply ends.",
            param="max_tokens",
        )
    if any(not stop for stop in spec.stop):
        raise RequestInvalid("A stop string is empty; give text or leave it out.", param="stop")
    if spec.prompt_logprobs is not None and not 0 <= spec.prompt_logprobs <= MAX_LOGPROBS:
        raise RequestInvalid(
            f"logprobs is {spec.prompt_logprobs}; give a whole number from 0 to {MAX_LOGPROBS}.",
            param="logprobs",
        )
    if spec.timeout_s is not None and not spec.timeout_s > 0:
        raise RequestInvalid(
            f"The timeout is {spec.timeout_s} s; give more than 0, or leave it out.",
            param="timeout",
        )
    if spec.constraint is not None and spec.ignore_eos:
        raise RequestInvalid(
            "ignore_eos contradicts an answer format or tools, which say where a reply ends; leave"
            " it out.",
            param="ignore_eos",
        )
    if spec.thinking_budget is not None and spec.thinking_budget < 0:
        raise RequestInvalid(
            f"The thinking budget is {spec.thinking_budget} tokens; give at least 0, or leave it"
            " out.",
            param="thinking_budget",
        )
    if len(spec.prompt_ids) >= context_tokens:
        raise ContextOverflow(len(spec.prompt_ids), context_tokens, spec.max_tokens or 1)


def text_only(model_id: str) -> str:
    """The refusal of images by a model that has no vision tower."""
    return (
        f"The conversation has an image or a video, and {model_id} reads text only: leave it out,"
        " or start with a model that has a vision tower (for a GGUF file, its --mmproj)."
    )


def _check_images(spec: GenerateRequest) -> None:
    """Images ascend, and each has as many equal placeholder ids as it has tokens."""
    stop = 0
    for item in spec.images:
        ids = spec.prompt_ids[item.position : item.position + item.image.tokens]
        if item.position < stop or len(ids) != item.image.tokens or len(set(ids)) != 1:
            raise RequestInvalid(
                f"The image at token {item.position} does not lie on {item.image.tokens}"
                " placeholder ids of its own.",
                param="images",
            )
        stop = item.position + item.image.tokens


class Request:
    """One generation's books: state, tokens, times. Owned by the step thread.

    `cancel` is the one method that other threads may call.
    """

    __slots__ = (
        "_cancel_cause",
        "_decoding_s",
        "_prefilling_s",
        "_submitted_s",
        "_to_prefill",
        "cached_tokens",
        "draft_depths",
        "draft_tokens",
        "draft_tokens_accepted",
        "ended_s",
        "generated_ids",
        "key",
        "prefilled_tokens",
        "saving",
        "scored_tokens",
        "spec",
        "state",
        "text_bytes",
    )

    def __init__(self, key: int, spec: GenerateRequest, *, now_s: float) -> None:
        self.key = key
        self.spec = spec
        self.state = RequestState.QUEUED
        self.cached_tokens = 0
        self.prefilled_tokens = 0
        self.scored_tokens = 1  # prompt tokens whose log-probability is told; the first has none
        self.saving: CacheSaving | None = None
        self.generated_ids: list[int] = []
        self.text_bytes = 0
        self.draft_tokens = self.draft_tokens_accepted = 0
        self.draft_depths: list[tuple[int, int]] = []  # drafted, accepted
        self.ended_s: float | None = None
        self._to_prefill = len(spec.prompt_ids)
        self._cancel_cause: CancelCause | None = None
        self._submitted_s = now_s
        self._prefilling_s: float | None = None
        self._decoding_s: float | None = None

    def cancel(self, cause: CancelCause = CancelCause.CLIENT) -> None:
        """Ask for the end; safe from any thread, at any time, any number of times."""
        if self._cancel_cause is None:
            self._cancel_cause = cause

    def overdue(self, now_s: float) -> CancelCause | None:
        """Why the request has to end now: it was called off, or its time is over; else None."""
        if self._cancel_cause is not None:
            return self._cancel_cause
        limit_s = self.spec.timeout_s
        late = limit_s is not None and now_s - self._submitted_s >= limit_s
        return CancelCause.TIMEOUT if late else None

    @property
    def queued(self) -> bool:
        """Whether it waits."""
        return self.state is RequestState.QUEUED

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt_ids)

    @property
    def prefill_tokens(self) -> int:
        """Tokens that the present prefill reaches to: the prompt, and what was generated before."""
        return self._to_prefill

    @property
    def prompt_left(self) -> int:
        """Tokens that have to be computed before the next one can be chosen by a prefill."""
        return self._to_prefill - self.prefilled_tokens

    @property
    def uses_cache(self) -> bool:
        """Whether stored state may stand in for prompt tokens; not where each has to tell its row."""
        return self.spec.use_cache and self.spec.prompt_logprobs is None

    @property
    def scores(self) -> bool:
        """Whether the next prompt tokens computed tell log-probabilities."""
        if self.spec.prompt_logprobs is None:
            return False
        return (
            self.scored_tokens < self.prompt_tokens and self.prefilled_tokens < self.prompt_tokens
        )

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The prompt, and what was generated so far."""
        return (*self.spec.prompt_ids, *self.generated_ids)

    def next_prompt_ids(self, n_tokens: int) -> tuple[int, ...]:
        """The next tokens to prefill."""
        start, stop = self.prefilled_tokens, self.prefilled_tokens + n_tokens
        prompt = self.spec.prompt_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        return self.sequence_ids[start:stop]

    def leave_queue(self, *, now_s: float) -> None:
        """Begin to look for stored state."""
        self._move(RequestState.RESTORING)
        if self._prefilling_s is None:
            self._prefilling_s = now_s

    def restored(self, cached_tokens: int, saving: CacheSaving | None = None) -> None:
        """Begin to prefill; `cached_tokens` of the sequence are in the session already."""
        assert 0 <= cached_tokens < self._to_prefill, "one prompt token at least is computed"
        self._move(RequestState.PREFILLING)
        self.prefilled_tokens = cached_tokens
        if self.saving is None:  # what a later admission finds again is no saving
            self.cached_tokens = min(cached_tokens, self.prompt_tokens - 1)
            self.saving = saving or CacheSaving()

    def prefilled(self, n_tokens: int, *, now_s: float) -> None:
        """Count prompt tokens that were computed; the last ones begin the decoding."""
        assert self.state is RequestState.PREFILLING, "prompt tokens are computed while prefilling"
        assert 0 < n_tokens <= self.prompt_left, "a chunk is a non-empty part of what is left"
        self.prefilled_tokens += n_tokens
        if not self.prompt_left:
            self._move(RequestState.DECODING)
            self._decoding_s = now_s if self._decoding_s is None else self._decoding_s

    def put_back(self) -> None:
        """Wait again; all that was computed and generated so far is to be prefilled then."""
        self._move(RequestState.QUEUED)
        self.prefilled_tokens = 0
        self._to_prefill = self.prompt_tokens + len(self.generated_ids)

    def generated(self, token_id: int) -> None:
        """Count a token that was chosen, an end token too."""
        assert self.state is RequestState.DECODING, "tokens are chosen while decoding"
        self.generated_ids.append(token_id)

    def drafted(self, n_drafts: int, n_accepted: int) -> None:
        """Count drafted tokens that were verified, and those that stood."""
        self.draft_tokens += n_drafts
        self.draft_tokens_accepted += n_accepted
        missing = n_drafts - len(self.draft_depths)
        self.draft_depths += [(0, 0)] * missing
        for depth in range(n_drafts):
            drafted, accepted = self.draft_depths[depth]
            self.draft_depths[depth] = (drafted + 1, accepted + (depth < n_accepted))

    def exhausted(self, *, context_tokens: int, max_text_bytes: int) -> bool:
        """Whether the token budget, the context or the text limit ends the reply here."""
        n_generated = len(self.generated_ids)
        budget = self.spec.max_tokens
        return (
            (budget is not None and n_generated >= budget)
            or self.prompt_tokens + n_generated >= context_tokens
            or self.text_bytes >= max_text_bytes
        )

    def end(self, state: RequestState, *, now_s: float) -> None:
        """Move to a terminal state."""
        assert state.terminal, f"{state} is no end"
        self._move(state)
        self.ended_s = now_s

    def usage(self, *, now_s: float) -> Usage:
        """Counts and durations so far; each duration runs until the next state or until now."""
        end_s = now_s if self.ended_s is None else self.ended_s
        prefilling_s = end_s if self._prefilling_s is None else self._prefilling_s
        decoding_s = end_s if self._decoding_s is None else self._decoding_s
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.generated_ids),
            cached_tokens=self.cached_tokens,
            cache=self.saving or CacheSaving(),
            draft_tokens=self.draft_tokens,
            draft_tokens_accepted=self.draft_tokens_accepted,
            draft_depths=tuple(self.draft_depths),
            queue_s=prefilling_s - self._submitted_s,
            prefill_s=decoding_s - prefilling_s,
            decode_s=end_s - decoding_s,
        )

    def view(self) -> RequestView:
        """Its counts now, for any thread."""
        return RequestView(
            request_id=self.spec.request_id,
            state=self.state.value,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            processed_tokens=min(self.prefilled_tokens, self.prompt_tokens),
            generated_tokens=len(self.generated_ids),
            max_tokens=self.spec.max_tokens,
        )

    def check(self) -> None:
        """Prove that the books balance."""
        assert 0 <= self.prefilled_tokens <= self._to_prefill
        assert 0 <= self.cached_tokens < self.prompt_tokens
        assert 0 <= self._to_prefill - self.prompt_tokens <= len(self.generated_ids)
        if self.state is RequestState.QUEUED:
            assert self.prefilled_tokens == 0
        if self.state in (RequestState.DECODING, RequestState.FINISHED):
            assert self.prompt_left == 0
        assert (self.ended_s is not None) == self.state.terminal
        assert self.spec.max_tokens is None or len(self.generated_ids) <= self.spec.max_tokens

    def _move(self, state: RequestState) -> None:
        assert state in LEGAL_MOVES[self.state], f"{self.state} cannot become {state}"
        self.state = state
