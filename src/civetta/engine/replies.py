"""`Replies`: from logits to the reply's next token, its text, and its end where it ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from civetta.decode.accept import accept
from civetta.decode.sampler import SampleRow, log_probability, require_finite
from civetta.decode.shortlist import ListedRow, sample
from civetta.engine.protocol import PromptLogprobs, TokenEvent
from civetta.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from civetta.decode.accept import Verdict
    from civetta.decode.sampler import Sampled
    from civetta.decode.shortlist import LogitRow
    from civetta.engine.finish import Finisher
    from civetta.engine.job import Job
    from civetta.engine.tally import Tally


class Replies:
    """Chooses and delivers tokens. `end_ids` are the tokens that end a reply."""

    def __init__(
        self,
        finisher: Finisher,
        tally: Tally,
        *,
        end_ids: Collection[int],
        context_tokens: int,
        max_text_bytes: int,
    ) -> None:
        self._finisher, self._tally = finisher, tally
        self._end_ids = frozenset(end_ids)
        self._context_tokens, self._max_text_bytes = context_tokens, max_text_bytes
        # One thread, made when it is first needed: masks wait for no launch, nor launches for them.
        self._beside = ThreadPoolExecutor(1, "civetta-masks")

    def judge(self, job: Job, draft_ids: Sequence[int], rows: Sequence[LogitRow]) -> Verdict:
        """The tokens that follow everything generated so far, from the rows behind each draft.

        Raises LogitsInvalid.
        """
        end_ids = () if job.request.spec.ignore_eos else self._end_ids
        masks = None if job.guide is None else job.guide.rows(draft_ids)
        return accept(draft_ids, rows, self._row(job), end_ids, masks)

    def sample(self, job: Job, logits: LogitRow) -> Sampled:
        """The token that follows everything generated so far. Raises LogitsInvalid."""
        row = self._row(job)
        if job.guide is not None:
            row = replace(row, mask=job.guide.rows()[0])
        return sample(logits, row)

    def expect(self, job: Job, draft_ids: Sequence[int] = ()) -> None:
        """Let the masks of the rows of a launch be computed beside it."""
        if job.guide is not None:
            job.guide.begin_rows(draft_ids, self._beside)

    def close(self) -> None:
        """End the thread beside the launches."""
        self._beside.shutdown(wait=True, cancel_futures=True)

    def score(self, job: Job, rows: Sequence[LogitRow]) -> None:
        """Tell the log-probabilities of the prompt tokens behind those of the rows.

        Raises LogitsInvalid, and OutputBackpressure when the reader left too much unread.
        """
        request = job.request
        count, ids = request.spec.prompt_logprobs, request.spec.prompt_ids
        assert count is not None, "asked for"
        found = []
        for place, logits_V in enumerate(rows, request.prefilled_tokens + 1):
            assert not isinstance(logits_V, ListedRow), "rows that score a prompt come whole"
            if place >= len(ids) or place < request.scored_tokens:  # told before it was put back
                continue
            require_finite(logits_V)
            found.append(log_probability(logits_V, ids[place], count))
        request.scored_tokens += len(found)
        if found:
            job.outbox.put(PromptLogprobs(logprobs=tuple(found)))

    def read_only(self, job: Job) -> None:
        """End a request that wanted no token."""
        self._finisher.finish(job, FinishReason.LENGTH)

    def _row(self, job: Job) -> SampleRow:
        request = job.request
        return SampleRow(
            params=request.spec.sampling,
            position=request.prompt_tokens + len(request.generated_ids),
            history=job.begun.history,
        )

    def accept(self, job: Job, sampled: Sampled) -> bool:
        """Take a chosen token into the reply and deliver it; whether the reply goes on.

        Raises OutputBackpressure when the reader left too much unread.
        """
        request, reply = job.request, job.begun
        token_id = sampled.token_id
        request.generated(token_id)
        reply.history.append(token_id)
        self._tally.generated_tokens += 1
        if token_id in self._end_ids and not request.spec.ignore_eos:
            # No logprob: the lists that clients get run along the text, and this token has none.
            job.outbox.put(TokenEvent(token_id=token_id, text=""))
            self._finisher.finish(job, FinishReason.STOP)
            return False
        if job.guide is not None:
            job.guide.advance(token_id)
        certain = reply.text.push(token_id)
        request.text_bytes += len(certain.text.encode())
        job.outbox.put(TokenEvent(token_id=token_id, text=certain.text, logprob=sampled.logprob))
        if certain.stop is not None:
            self._finisher.finish(job, FinishReason.STOP, stop=certain.stop)
            return False
        if request.exhausted(
            context_tokens=self._context_tokens, max_text_bytes=self._max_text_bytes
        ):
            self._finisher.finish(job, FinishReason.LENGTH)
            return False
        return True
