"""The ranges of sampling values, refused by name (reference.md 2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from civetta.types import SamplingParams

MAX_LOGPROBS = 20
MAX_BIASES = 1024
BIAS_LIMIT = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Inclusive bounds of one value; high None is unbounded."""

    low: float
    high: float | None
    whole: bool


RANGES = {
    "temperature": Range(low=0, high=2, whole=False),
    "top_k": Range(low=0, high=None, whole=True),
    "top_p": Range(low=0, high=1, whole=False),
    "min_p": Range(low=0, high=1, whole=False),
    "min_keep": Range(low=1, high=None, whole=True),
    "seed": Range(low=0, high=2**64 - 1, whole=True),
    "repeat_penalty": Range(low=0.01, high=10, whole=False),
    "repeat_last_n": Range(low=-1, high=None, whole=True),
    "frequency_penalty": Range(low=-2, high=2, whole=False),
    "presence_penalty": Range(low=-2, high=2, whole=False),
    "logprobs": Range(low=0, high=MAX_LOGPROBS, whole=True),
}


def check_sampling(params: SamplingParams) -> None:
    """Raise RequestInvalid naming the first value that is out of range, else return."""
    for name, limits in RANGES.items():
        value = getattr(params, name)
        if name == "logprobs" and value is None:
            continue
        if not _fits(value, limits):
            raise RequestInvalid(
                f"{name} is {value!r}; give {_expects(limits)}, or leave it out.", param=name
            )
    _check_bias(params.logit_bias)


def _check_bias(bias: tuple[tuple[int, float], ...]) -> None:
    if len(bias) > MAX_BIASES:
        raise RequestInvalid(
            f"logit_bias has {len(bias)} tokens; give {MAX_BIASES} at most.", param="logit_bias"
        )
    for token_id, value in bias:
        if not abs(value) <= BIAS_LIMIT:  # so that NaN is refused too
            raise RequestInvalid(
                f"logit_bias of token {token_id} is {value}; give a number from -{BIAS_LIMIT:g} to"
                f" {BIAS_LIMIT:g}.",
                param="logit_bias",
            )


def _fits(value: object, limits: Range) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if limits.whole else (int, float)):
        return False
    if not math.isfinite(value):
        return False
    return limits.low <= value and (limits.high is None or value <= limits.high)


def _expects(limits: Range) -> str:
    noun = "a whole number" if limits.whole else "a number"
    if limits.high is None:
        return f"{noun} of at least {limits.low:g}"
    high = limits.high if isinstance(limits.high, int) else f"{limits.high:g}"
    return f"{noun} from {limits.low:g} to {high}"
