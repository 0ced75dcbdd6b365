"""Choosing a token from the best tokens of a row, where that gives what the whole row would give.

On a GPU a row of logits is a megabyte that the host would have to fetch; a shortlist is a kilobyte
(kernels/shortlist). The rules are those of sampler.py, run on the listed tokens; what decides whether
they suffice is `bar`: a token that is not listed has a logit of at most `bar`, and penalties lower it
only. Where nothing cuts by logits, every token takes part in the draw: the list then holds the best
scores, logit / temperature + noise, and `bar` is a score. If a token outside the list could take part
in a decision, or a sum is within rounding of a cut, there is no answer here, and the whole row is
fetched: a reply cannot depend on which way was taken.

Legend: N listed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from civetta.decode.sampler import (
    Sampled,
    apply_penalties,
    best_ids,
    choose_from,
    sample_row,
    scaled,
)
from civetta.kernels.philox import gumbel
from civetta.kernels.shortlist.reference import SUMS
from civetta.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.decode.history import TokenHistory
    from civetta.decode.sampler import Floats, Ids, SampleRow
    from civetta.types import SamplingParams

KEEP = 128
"""Tokens that are listed: six times the usual top-k, so that penalties and masks leave enough."""

ROUNDING = 1e-9
"""Sums of exponentials in another order differ by far less, relatively."""

SCORE_ROUNDING = 1e-3
"""Scores that a device makes are float32: of some hundreds they are off by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a row is listed for: the sampling parameters, and the position of the new token."""

    params: SamplingParams
    position: int

    @property
    def temperature(self) -> float:
        """Of the sums and scores; 1 where neither is needed."""
        return self.params.temperature or 1.0

    @property
    def noisy(self) -> bool:
        """Whether the tokens that can win are those of the best scores: nothing cuts by logits."""
        p = self.params
        return p.temperature > 0 and p.top_k == 0 and p.top_p >= 1 and p.min_p == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """ids int64 [N], ascending, and their logits float32 [N]; every other logit is at most `bar`,
    or every other score, nearly, where `asked` is noisy.

    `total`: sum of exp((logit - max) / temperature) over the vocabulary, `plain_total` the same for
    a temperature of 1. `finite`: whether all logits are; if not, nothing else means anything.
    """

    asked: Asked
    ids_N: Ids
    logits_N: NDArray[np.float32]
    bar: float
    total: float
    plain_total: float
    finite: bool

    @classmethod
    def of(cls, found_W: NDArray[np.float64], vocab: int, asked: Asked) -> Shortlist:
        """A row of what kernels/shortlist makes, for a vocabulary of so many tokens."""
        words = found_W[SUMS:].view(np.int32)
        count = min(len(words) // 2, vocab)
        ids_N, bits_N = words[:count], words[len(words) // 2 :][:count]
        logits_N = bits_N.view(np.float32)
        return cls(
            asked=asked,
            ids_N=ids_N.astype(np.int64),
            logits_N=logits_N,
            bar=float("-inf") if count == vocab else float(found_W[3]),
            total=float(found_W[0]),
            plain_total=float(found_W[1]),
            finite=not found_W[2],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRow:
    """A row of logits elsewhere: its shortlist is here, `fetch` brings all of it, float32 [V]."""

    shortlist: Shortlist
    fetch: Callable[[], NDArray[np.float32]]


LogitRow = NDArray[np.float32] | ListedRow
"""One row of logits: here, float32 [V], or elsewhere."""


def sample(logits: LogitRow, row: SampleRow) -> Sampled:
    """Choose the token at row.position. Raises LogitsInvalid when a logit is NaN or infinite."""
    if not isinstance(logits, ListedRow):
        return sample_row(logits, row)
    found = logits.shortlist
    token_id = _choose(found, row) if found.finite else None
    if token_id is None:
        return sample_row(logits.fetch(), row)
    if row.params.logprobs is None:
        return Sampled(token_id=token_id)
    return Sampled(
        token_id=token_id, logprob=_log_probability(found, token_id, row.params.logprobs)
    )


def _choose(found: Shortlist, row: SampleRow) -> int | None:
    """The token, or None where the list does not tell it."""
    params, asked = row.params, found.asked
    assert (asked.params, asked.position) == (params, row.position), "listed for another row"
    if params.logit_bias or not _lower_only(params) or (params.logprobs or 0) > len(found.ids_N):
        return None
    whole = found.bar == float("-inf")
    values_N = apply_penalties(found.logits_N, params, _Listed(row.history, found.ids_N))
    total = found.total if values_N is found.logits_N and row.mask is None else None
    ids_N = found.ids_N
    if row.mask is not None:
        allowed_N = row.mask.allows_each(ids_N)
        ids_N, values_N = ids_N[allowed_N], values_N[allowed_N]
    if not len(ids_N):
        return None
    if whole:
        return choose_from(values_N, row, ids_N)
    if asked.noisy:
        return None if params.logprobs else _by_score(values_N, ids_N, found)
    if not _suffices(values_N, found.bar, params, total):
        return None
    return choose_from(values_N, row, ids_N, total)


def _by_score(values_N: Floats, ids_N: Ids, found: Shortlist) -> int | None:
    """The token of the best score, if no other can be as good."""
    params, position = found.asked.params, found.asked.position
    noise_N = gumbel(seed=params.seed, position=position, ids_N=ids_N)
    score_N = scaled(values_N, 0.0, params.temperature) + noise_N
    best = int(np.argmax(score_N))
    others = score_N[np.arange(len(score_N)) != best]
    bar = max(found.bar + SCORE_ROUNDING * (1 + abs(found.bar)), others.max(initial=-np.inf))
    return int(ids_N[best]) if score_N[best] > bar + ROUNDING * (1 + abs(bar)) else None


def _lower_only(params: SamplingParams) -> bool:
    """Whether no penalty can raise a logit."""
    repeats = params.repeat_last_n == 0 or params.repeat_penalty >= 1
    return repeats and params.frequency_penalty >= 0 and params.presence_penalty >= 0


def _suffices(values_N: Floats, bar: float, params: SamplingParams, total: float | None) -> bool:
    """Whether no token of at most `bar` can be chosen, or be counted in what cuts.

    `total` is the sum of all weights; None: not known.
    """
    above = int(np.count_nonzero(values_N > bar))
    if params.temperature == 0:
        return above > 0
    if params.top_k > 0:
        return above >= max(params.top_k, params.min_keep)
    if above < params.min_keep:
        return False
    peak = float(values_N.max())
    if params.top_p < 1:
        return total is not None and _reaches(values_N[values_N > bar], peak, params, total)
    least = float(np.exp(scaled(np.array([bar]), peak, params.temperature))[0])
    weights_N = np.exp(scaled(values_N, peak, params.temperature))
    enough = int(np.count_nonzero(weights_N >= params.min_p)) >= params.min_keep
    return enough and least < params.min_p * (1 - ROUNDING)


def _reaches(above_N: Floats, peak: float, params: SamplingParams, total: float) -> bool:
    """Whether the weights reach top-p's part of the whole, with no sum too near to it to tell."""
    goal = params.top_p * total
    best_first_N = np.sort(above_N)[::-1].astype(np.float64)
    sums_N = np.exp(scaled(best_first_N, peak, params.temperature)).cumsum()
    near = np.abs(sums_N - goal) <= ROUNDING * total
    return bool(sums_N[-1] > goal) and not near.any()


def _log_probability(found: Shortlist, token_id: int, n_top: int) -> TokenLogprob:
    """As sampler.log_probability; the sum over the vocabulary is the shortlist's."""
    wide_N = found.logits_N.astype(np.float64)
    shift = float(wide_N.max()) + float(np.log(found.plain_total))
    place = int(np.searchsorted(found.ids_N, token_id))
    return TokenLogprob(
        token_id=token_id,
        logprob=float(wide_N[place]) - shift,
        top=tuple(
            (int(found.ids_N[i]), float(wide_N[i]) - shift) for i in best_ids(found.logits_N, n_top)
        ),
    )


class _Listed:
    """A history as far as it concerns listed tokens; they go by their places in the list."""

    def __init__(self, history: TokenHistory, ids_N: Ids) -> None:
        self._history, self._ids_N = history, ids_N

    def window_ids(self) -> Ids:
        return self._places(self._history.window_ids())[0]

    def generated_counts(self) -> tuple[Ids, NDArray[np.float64]]:
        ids_M, counts_M = self._history.generated_counts()
        places_M, listed_M = self._places(ids_M)
        return places_M, counts_M[listed_M]

    def _places(self, ids_M: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """Places of those that are listed, and which those are."""
        places_M = np.searchsorted(self._ids_N, ids_M)
        listed_M = self._ids_N[np.minimum(places_M, len(self._ids_N) - 1)] == ids_M
        return places_M[listed_M].astype(np.int64), listed_M
