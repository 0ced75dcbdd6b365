"""Drafters: guesses at the next tokens of several replies, to be verified in one launch.

A draft is drawn with the very rule and noise that will decide the token (sampler), on the draft
head's logits: where the head is nearly right, the same token wins. Each drafted token carries a
`grade`: how sure its source was, in steps that `lengths.Acceptance` learns the worth of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from civetta.decode.sampler import Candidates, candidates, draw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from civetta.decode.history import TokenHistory
    from civetta.decode.lookup import TextIndex
    from civetta.model.mtp import MtpHead
    from civetta.state.session import Session
    from civetta.types import SamplingParams

MTP_GRADES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Upper bounds of the head's own probability for its draft; grade 8 is above the last."""
LOOKUP_GRADES = (2, 3, 5, 8, 13, 21)
"""Match lengths below which a looked-up draft has grade 9, 10, ...; grade 15 is above the last."""
N_GRADES = len(MTP_GRADES) + len(LOOKUP_GRADES) + 2
DRAFT_CANDIDATES = 64
"""Likeliest tokens of the head that a sampled draft is drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTask:
    """One reply that wants drafts. `history` ends with `next_id`, which no launch has seen yet.

    `most` drafts at most; pages for them are reserved. `text` holds the same tokens as history.
    """

    session: Session
    next_id: int
    params: SamplingParams
    history: TokenHistory
    text: TextIndex
    most: int


@dataclass(slots=True, kw_only=True)
class Draft:
    """Guessed tokens, first to last, and the grade of each; `looked_up` in the text itself."""

    ids: list[int]
    grades: list[int]
    looked_up: bool = False

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.ids[length:], self.grades[length:]


class Drafter(Protocol):
    """Guesses at what replies will say."""

    def propose(
        self, tasks: Sequence[DraftTask], go_on: Callable[[int, Draft], bool]
    ) -> list[Draft]:
        """One draft a task, perhaps empty. `go_on(place, so_far)` says whether one more token of a
        task is worth its cost; it is asked before each."""
        ...


class LookupDrafter:
    """Drafts what followed the longest earlier match of the newest tokens."""

    def propose(
        self, tasks: Sequence[DraftTask], go_on: Callable[[int, Draft], bool]
    ) -> list[Draft]:
        """See `Drafter`."""
        drafts = []
        for place, task in enumerate(tasks):
            ids, match = task.text.continuation(task.most)
            draft = Draft(ids=[], grades=[])
            grade = lookup_grade(match)
            for token_id in ids:
                if not go_on(place, draft):
                    break
                draft.ids.append(token_id)
                draft.grades.append(grade)
            drafts.append(draft)
        return drafts


class MtpDrafter:
    """Drafts with the model's own head, several replies a step; tasks drop out one by one.

    `announce(session, ids)` is told what the session's next launch will begin with as it becomes
    known, so that what has to be read for it is read while the next step draws more.
    """

    def __init__(
        self, head: MtpHead, announce: Callable[[Session, Sequence[int]], None] | None = None
    ) -> None:
        self._head, self._announce = head, announce

    def propose(
        self, tasks: Sequence[DraftTask], go_on: Callable[[int, Draft], bool]
    ) -> list[Draft]:
        """See `Drafter`. Sessions need the streams of their newest token (`mtp.can_draft`)."""
        drafts = [Draft(ids=[], grades=[]) for _ in tasks]
        try:
            self._run(tasks, drafts, go_on)
        finally:
            for task, draft in zip(tasks, drafts, strict=True):
                task.history.rewind(len(draft.ids))
        return drafts

    def _run(
        self,
        tasks: Sequence[DraftTask],
        drafts: list[Draft],
        go_on: Callable[[int, Draft], bool],
    ) -> None:
        places = [i for i, task in enumerate(tasks) if task.most > 0 and go_on(i, drafts[i])]
        if not places:
            return
        sessions = [tasks[i].session for i in places]
        logits_BV, chain = self._head.begin(sessions, [tasks[i].next_id for i in places])
        while True:
            drawn = _draw_all([tasks[i] for i in places], logits_BV)
            for i, (token_id, probability) in zip(places, drawn, strict=True):
                tasks[i].history.append(token_id)
                drafts[i].ids.append(token_id)
                drafts[i].grades.append(mtp_grade(probability))
                if self._announce is not None:
                    self._announce(tasks[i].session, [tasks[i].next_id, *drafts[i].ids])
            stay = [
                k
                for k, i in enumerate(places)
                if len(drafts[i].ids) < tasks[i].most and go_on(i, drafts[i])
            ]
            if not stay:
                return
            if len(stay) < len(places):
                chain = chain.keep(stay)
                places = [places[k] for k in stay]
            logits_BV, chain = self._head.extend(chain, [drafts[i].ids[-1] for i in places])


def mtp_grade(probability: float) -> int:
    """0 (unsure) to 8."""
    return int(np.searchsorted(MTP_GRADES, probability))


def lookup_grade(match: int) -> int:
    """9 (one token alike) to 15."""
    return len(MTP_GRADES) + 1 + int(np.searchsorted(LOOKUP_GRADES, match, side="right"))


def _draw_all(tasks: Sequence[DraftTask], logits_BV: Tensor) -> list[tuple[int, float]]:
    """A token for each row, and the head's probability of it."""
    most = min(DRAFT_CANDIDATES, logits_BV.shape[1])
    best_BN, ids_BN = logits_BV.topk(most, dim=-1)
    total_B = logits_BV.logsumexp(-1).cpu().numpy()
    values_BN, ids = best_BN.double().cpu().numpy(), ids_BN.cpu().numpy()
    drawn = []
    for row, task in enumerate(tasks):
        place = _draw(task, values_BN[row], ids[row])
        drawn.append((int(ids[row, place]), float(np.exp(values_BN[row, place] - total_B[row]))))
    return drawn


def _draw(task: DraftTask, values_N: NDArray[np.float64], ids_N: NDArray[np.int64]) -> int:
    """Place of the token that the sampler's rule takes among the head's likeliest ones."""
    params = task.params
    values_N = _penalized(_biased(values_N, ids_N, params), ids_N, params, task.history)
    if params.temperature == 0:
        return int(np.argmax(values_N))
    kept = candidates(values_N, params)
    real_N = ids_N[kept.ids_N]
    token_id = draw(
        Candidates(ids_N=real_N, scaled_N=kept.scaled_N),
        seed=params.seed,
        position=len(task.history),
    )
    return int(np.flatnonzero(ids_N == token_id)[0])


def _biased(
    values_N: NDArray[np.float64], ids_N: NDArray[np.int64], params: SamplingParams
) -> NDArray[np.float64]:
    """The biases of `sampler.apply_bias`, for the candidates alone."""
    if not params.logit_bias:
        return values_N
    bias = dict(params.logit_bias)
    bias_N = np.array([bias.get(i, 0.0) for i in ids_N.tolist()], np.float64)
    biased_N: NDArray[np.float64] = values_N + bias_N
    return biased_N


def _penalized(
    values_N: NDArray[np.float64],
    ids_N: NDArray[np.int64],
    params: SamplingParams,
    history: TokenHistory,
) -> NDArray[np.float64]:
    """The penalties of `sampler.apply_penalties`, for the candidates alone."""
    if params.repeat_penalty != 1.0 and params.repeat_last_n != 0:
        seen_N = np.isin(ids_N, history.window_ids())
        penalty = params.repeat_penalty
        punished_N = np.where(values_N > 0, values_N / penalty, values_N * penalty)
        values_N = np.where(seen_N, punished_N, values_N)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        generated_M, counts_M = history.generated_counts()
        counts = dict(zip(generated_M.tolist(), counts_M.tolist(), strict=True))
        times_N = np.array([counts.get(i, 0.0) for i in ids_N.tolist()])
        shift_N = params.frequency_penalty * times_N + params.presence_penalty * (times_N > 0)
        values_N = values_N - shift_N
    return values_N
