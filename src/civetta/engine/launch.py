"""`Launcher`: pieces of several sequences through the model at once, rows back to their owners.

Pages are reserved before a launch. Where they do not suffice, cached states go first; then whoever
was admitted last goes back to the queue, and its tokens are computed again later: a reply does not
depend on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from civetta.decode.shortlist import Asked
from civetta.engine.logit_rows import host_rows, listed_rows
from civetta.errors import EngineBusy
from civetta.model.inputs import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from civetta.cache.protocol import ContinuationCache
    from civetta.decode.shortlist import LogitRow
    from civetta.engine.job import Job
    from civetta.engine.language_model import LanguageModel
    from civetta.model.inputs import ImageRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """New tokens of one job; `rows` says which of them need logits, `next_ids` what follows them."""

    job: Job
    ids: Sequence[int]
    rows: Literal["none", "last", "all"]
    next_ids: Sequence[int] = ()
    images: Sequence[ImageRows] = ()

    @property
    def n_rows(self) -> int:
        """Rows of logits that come back."""
        return {"none": 0, "last": 1, "all": len(self.ids)}[self.rows]


class Launcher:
    """Runs parts. `put_back()` sends one running request back; False when only one runs."""

    def __init__(
        self,
        model: LanguageModel,
        cache: ContinuationCache,
        *,
        put_back: Callable[[], bool],
    ) -> None:
        self._model, self._cache = model, cache
        self._put_back = put_back

    def reserve(self, job: Job, n_tokens: int) -> bool:
        """Take the pages that a job's next tokens need.

        False when the job itself had to give way. Raises EngineBusy when there is no room even
        for this job alone.
        """
        while job.session is not None:
            try:
                job.session.reserve(n_tokens)
            except EngineBusy:
                pages = job.session.pages_needed(n_tokens)
                if not self._cache.make_room(pages) and not self._put_back():
                    raise
            else:
                return True
        return False

    def expect_newest(self, job: Job) -> None:
        """Tell the model which token the job's next launch begins with."""
        self.expect(job, job.request.generated_ids[-1:])

    def expect(self, job: Job, ids: Sequence[int]) -> None:
        """Tell the model which tokens the job's next launch begins with."""
        self._model.expect(job.live, ids)

    def run(self, parts: Sequence[Part]) -> list[Sequence[LogitRow]]:
        """Launch; each part's rows of logits. Raises what the model raises.

        On a GPU they are shortlists, except those of a prompt that is scored.
        """
        pieces = [
            Piece(
                session=part.job.live,
                ids=part.ids,
                rows=part.rows,
                next_ids=part.next_ids,
                images=part.images,
            )
            for part in parts
        ]
        return self._rows_of(parts, self._model.forward_pieces(pieces))

    def _rows_of(self, parts: Sequence[Part], logits_TV: Tensor) -> list[Sequence[LogitRow]]:
        """Each part's rows. How a row comes hangs on its own request: log-probabilities differ by a
        rounding between a shortlist and the whole row."""
        shortlists = self._model.shortlists
        rows: Sequence[LogitRow]
        if shortlists is None or not len(logits_TV):
            rows = list(host_rows(logits_TV))
        else:
            asked = list(chain.from_iterable(map(_asked, parts)))
            rows = listed_rows(logits_TV, asked, shortlists)
        found: list[Sequence[LogitRow]] = []
        stop = 0
        for part in parts:
            start, stop = stop, stop + part.n_rows
            scored = part.job.request.scores
            found.append(list(host_rows(logits_TV[start:stop])) if scored else rows[start:stop])
        return found


def _asked(part: Part) -> list[Asked]:
    """What the rows of a part are for: the tokens behind all that is generated, and behind drafts."""
    request = part.job.request
    first = request.prompt_tokens + len(request.generated_ids)
    return [Asked(params=request.spec.sampling, position=first + i) for i in range(part.n_rows)]


def in_launches(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts that may share a launch, then each part that has to be alone."""
    together = [part for part in parts if not part.job.alone]
    groups = [together] if together else []
    return groups + [[part] for part in parts if part.job.alone]
