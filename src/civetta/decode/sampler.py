"""From one row of logits to one token: the reference that every kernel has to equal.

Legend: V vocabulary · N candidates that are left.

The order, and why it is this one:

1. biases         are part of what the model says, so they come first;
2. penalties      change what was said, so they come before everything that reads it;
3. the mask       what a grammar forbids is no candidate for anything that follows;
4. temperature    before the filters, so that top-p and min-p cut the distribution that is sampled;
5. top-k          cheapest cut first; later sums run over few candidates;
6. top-p          over what top-k left, renormalised;
7. min-p          relative to the best one, so it needs no renormalisation and can come last;
8. the draw       argmax(logit / T + Gumbel noise) over what is left, which is a draw from the
                  softmax of what is left (philox.gumbel).

Temperature 0 is the argmax after the mask; no filter can remove the best candidate.
Candidates are ordered by higher logit first, then lower id, and every cut takes a prefix of that
order, so ties never depend on an algorithm's whim. At least `min_keep` candidates survive each
cut. The noise belongs to (seed, position, token id) alone: the token is a function of the logits,
the parameters, the history and the seed, and a draft that draws with the same noise tends to agree.

Arithmetic after the logits is float64. Log-probabilities are the log-softmax of the raw logits,
before biases, penalties, mask and filters: they tell what the model thinks, not what was allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from civetta.errors import LogitsInvalid
from civetta.kernels.philox import gumbel
from civetta.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.decode.history import TokenHistory
    from civetta.decode.mask import TokenMask
    from civetta.types import SamplingParams

Floats = NDArray[np.float32] | NDArray[np.float64]
Ids = NDArray[np.int64]

FIRST_SORT = 1024
"""Candidates sorted first for a top-p without top-k; more follow only while they are needed."""


class SaidTokens(Protocol):
    """What penalties need of a history (history.TokenHistory)."""

    def window_ids(self) -> Ids:
        """Distinct tokens of the window."""
        ...

    def generated_counts(self) -> tuple[Ids, NDArray[np.float64]]:
        """Distinct generated tokens and how often each occurred."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """What one row of logits is sampled with; `position` is the index the new token will have.

    `mask`: the tokens that may be chosen; None: all.
    """

    params: SamplingParams
    position: int
    history: TokenHistory
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A chosen token; `logprob` when the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Tokens that passed the filters: ids int64 [N], scaled float64 [N] = (logit - max) / T."""

    ids_N: Ids
    scaled_N: NDArray[np.float64]


def sample_rows(logits_BV: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled]:
    """Sample each row by itself: logits float32 [B, V], one SampleRow a row.

    Raises LogitsInvalid when a logit is NaN or infinite.
    """
    assert logits_BV.shape[0] == len(rows), "one SampleRow belongs to each row of logits"
    return [sample_row(logits_V, row) for logits_V, row in zip(logits_BV, rows, strict=True)]


def sample_row(logits_V: NDArray[np.float32], row: SampleRow) -> Sampled:
    """Choose the token at row.position from logits float32 [V].

    Raises LogitsInvalid when a logit is NaN or infinite.
    """
    require_finite(logits_V)
    biased_V = apply_bias(logits_V, row.params)
    penalized_V = apply_penalties(biased_V, row.params, row.history)
    token_id = _choose(penalized_V, row)
    if row.params.logprobs is None:
        return Sampled(token_id=token_id)
    return Sampled(
        token_id=token_id, logprob=log_probability(logits_V, token_id, row.params.logprobs)
    )


def _choose(penalized_V: Floats, row: SampleRow) -> int:
    mask = row.mask
    if mask is not None and mask.allowed_N is not None:  # few: the others need no look
        return choose_from(penalized_V[mask.allowed_N], row, mask.allowed_N)
    if mask is not None:
        penalized_V = mask.apply(penalized_V)
    return choose_from(penalized_V, row)


def choose_from(
    values_N: Floats, row: SampleRow, ids_N: Ids | None = None, total: float | None = None
) -> int:
    """The token by its value; `ids_N` (ascending) are the tokens, left out: all of them.

    `total` as in `candidates`.
    """
    if row.params.temperature == 0:
        place = int(np.argmax(values_N))  # the first of equals: ties go to the lower id
        return place if ids_N is None else int(ids_N[place])
    kept = candidates(values_N, row.params, total)
    if ids_N is not None:
        kept = Candidates(ids_N=ids_N[kept.ids_N], scaled_N=kept.scaled_N)
    return draw(kept, seed=row.params.seed, position=row.position)


def apply_bias(logits_V: NDArray[np.float32], params: SamplingParams) -> Floats:
    """Logits with the biases added in float64: a copy, or the logits when there are none."""
    if not params.logit_bias:
        return logits_V
    biased_V = logits_V.astype(np.float64)
    for token_id, bias in params.logit_bias:
        biased_V[token_id] += bias
    return biased_V


def apply_penalties(logits_V: Floats, params: SamplingParams, history: SaidTokens) -> Floats:
    """Logits after repetition, then frequency and presence penalties; a copy if any is on.

    Repetition: once for each token of the window, positive logits are divided by the penalty and
    the others multiplied. Then logit -= frequency * count + presence, for generated tokens.
    """
    repeats = params.repeat_penalty != 1.0 and params.repeat_last_n != 0
    if not repeats and params.frequency_penalty == 0 and params.presence_penalty == 0:
        return logits_V
    penalized_V = logits_V.astype(np.float64)
    if repeats:
        ids_N = history.window_ids()
        seen_N = penalized_V[ids_N]
        penalty = params.repeat_penalty
        penalized_V[ids_N] = np.where(seen_N > 0, seen_N / penalty, seen_N * penalty)
    ids_N, counts_N = history.generated_counts()
    penalized_V[ids_N] -= params.frequency_penalty * counts_N + params.presence_penalty
    return penalized_V


def candidates(
    penalized_V: Floats, params: SamplingParams, total: float | None = None
) -> Candidates:
    """Temperature, top-k, top-p and min-p for a temperature above 0; at least one token is left.

    `total`: the sum of all weights, where the values are not all that there are.
    """
    peak = float(penalized_V.max())
    ids_N: Ids | None = None  # best first; None: every token, not sorted
    if params.top_k > 0:
        ids_N = best_ids(penalized_V, max(params.top_k, params.min_keep))
    if params.top_p < 1:
        ids_N = _top_p(penalized_V, ids_N, peak, params, total)
    if params.min_p > 0:
        ids_N = _min_p(penalized_V, ids_N, peak, params)
    if ids_N is None:
        ids_N = np.arange(penalized_V.shape[0], dtype=np.int64)
    return Candidates(ids_N=ids_N, scaled_N=scaled(penalized_V[ids_N], peak, params.temperature))


def draw(kept: Candidates, *, seed: int, position: int) -> int:
    """argmax(scaled + Gumbel noise of (seed, position, id)); equal sums go to the lower id."""
    if kept.ids_N.shape[0] == 1:
        return int(kept.ids_N[0])
    score_N = kept.scaled_N + gumbel(seed=seed, position=position, ids_N=kept.ids_N)
    return int(kept.ids_N[score_N == score_N.max()].min())


def log_probability(logits_V: NDArray[np.float32], token_id: int, n_top: int) -> TokenLogprob:
    """Log-softmax of raw logits at token_id, and the n_top best tokens, best first."""
    wide_V = logits_V.astype(np.float64)
    peak = float(wide_V.max())
    shift = peak + float(np.log(np.exp(wide_V - peak).sum()))
    return TokenLogprob(
        token_id=token_id,
        logprob=float(wide_V[token_id]) - shift,
        top=tuple((int(i), float(wide_V[i]) - shift) for i in best_ids(logits_V, n_top)),
    )


def best_ids(values_V: Floats, n: int) -> Ids:
    """Indices of the n highest values, best first, equal values by lower index: int64 [<= n]."""
    size = values_V.shape[0]
    if n == 0:
        return np.empty(0, dtype=np.int64)
    if n == 1:
        return np.array([np.argmax(values_V)], dtype=np.int64)  # the first of equals
    if n >= size:
        return np.argsort(-values_V, kind="stable").astype(np.int64)
    bar = np.partition(values_V, size - n)[size - n]
    above_N = np.flatnonzero(values_V > bar)
    level_N = np.flatnonzero(values_V == bar)[: n - above_N.shape[0]]
    ids_N = np.concatenate([above_N, level_N]).astype(np.int64)
    ordered_N: Ids = ids_N[np.argsort(-values_V[ids_N], kind="stable")]
    return ordered_N


def _top_p(
    penalized_V: Floats,
    ids_N: Ids | None,
    peak: float,
    params: SamplingParams,
    total: float | None,
) -> Ids:
    """Keep the shortest prefix whose weight reaches top_p of the whole (at least min_keep)."""
    if ids_N is not None:
        weights_N = np.exp(scaled(penalized_V[ids_N], peak, params.temperature))
        return ids_N[: _prefix_size(weights_N, params.top_p * weights_N.sum(), params.min_keep)]
    size = penalized_V.shape[0]
    if total is None:
        total = float(np.exp(scaled(penalized_V, peak, params.temperature)).sum())
    goal = params.top_p * total
    n = min(size, max(FIRST_SORT, params.min_keep))
    while True:
        ids_N = best_ids(penalized_V, n)
        weights_N = np.exp(scaled(penalized_V[ids_N], peak, params.temperature))
        if n == size or weights_N.cumsum()[-1] >= goal:
            return ids_N[: _prefix_size(weights_N, goal, params.min_keep)]
        n = min(size, n * 16)


def _prefix_size(weights_N: NDArray[np.float64], goal: float, min_keep: int) -> int:
    """Count candidates before which less than `goal` has been gathered, min_keep at least."""
    before_N = np.concatenate([[0.0], weights_N.cumsum()[:-1]])
    return max(min_keep, int(np.count_nonzero(before_N < goal)))


def _min_p(penalized_V: Floats, ids_N: Ids | None, peak: float, params: SamplingParams) -> Ids:
    """Keep candidates of at least min_p times the best one's weight (at least min_keep)."""
    held_N = penalized_V if ids_N is None else penalized_V[ids_N]
    keep_N = np.exp(scaled(held_N, peak, params.temperature)) >= params.min_p
    n = int(np.count_nonzero(keep_N))
    if ids_N is not None:
        return ids_N[: max(n, params.min_keep)]
    if n < params.min_keep:
        return best_ids(penalized_V, params.min_keep)
    return np.flatnonzero(keep_N).astype(np.int64)


def scaled(values_N: Floats, peak: float, temperature: float) -> NDArray[np.float64]:
    """(value - peak) / T: at most 0, and -inf where a tiny temperature overflows."""
    with np.errstate(over="ignore"):
        result: NDArray[np.float64] = (values_N.astype(np.float64) - peak) / temperature
    return result


def require_finite(logits_V: NDArray[np.float32]) -> None:
    """Raise LogitsInvalid when a logit is NaN or infinite."""
    finite_V = np.isfinite(logits_V)
    if not finite_V.all():
        bad = np.flatnonzero(~finite_V)
        raise LogitsInvalid(
            f"The model computed {len(bad)} logits of {len(logits_V)} that are not finite (the"
            f" first is {logits_V[bad[0]]} for token {bad[0]}); check the model's files with"
            " `civetta diagnose`, and try another --dtype or --device."
        )
