"""Request fields that the OpenAI dialects share, and what they mean.

A field that OpenAI defines and civetta does not act on is taken at its neutral value only; any
other value is refused by name. Labels that never change a reply (`user`, `metadata`, ...) are free.
"""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from civetta.errors import RequestInvalid
from civetta.options import all_settings
from civetta.setting import INT_MAX
from civetta.types import SamplingOverrides

MAX_STOPS = 16
MAX_STOP_BYTES = 4096
MAX_STOPS_BYTES = 16_384
MAX_LOGPROBS = 20
_SETTINGS = all_settings()
_OVERRIDES = SamplingOverrides.__dataclass_fields__
# Spellings of other servers for "off": top_k -1 (vLLM), min_keep 0 and seed -1 (llama.cpp).
_OFF: dict[tuple[str, int], int | None] = {
    ("top_k", -1): 0,
    ("min_keep", 0): 1,
    ("seed", -1): None,
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of every dialect that say how tokens are chosen; None means left out."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_keep: int | None = None
    seed: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class SharedFields(SamplingFields, kw_only=True):
    """Fields of both chat and plain completions; None means that the field was left out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    def check_neutral(self) -> None:
        """Refuse values of fields that civetta does not act on; raises RequestInvalid."""
        neutral("timings_per_token", self.timings_per_token, False, "timings come at the end")
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "it goes with stream: true only; leave it out")
        # include_obfuscation only pads events against traffic analysis; any value is harmless.

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def neutral(name: str, value: object, allowed: object, why: str) -> None:
    """Raise RequestInvalid unless `value` was left out or is the one `allowed`."""
    if value is not None and value != allowed:
        refuse(name, f"{why}, so only {msgspec.json.encode(allowed).decode()} is accepted")


def refuse(name: str, why: str) -> NoReturn:
    """Raise the RequestInvalid of a known field whose value is not supported."""
    raise RequestInvalid(
        f"Unsupported value of {name}: {why}.", param=name, code="unsupported_parameter"
    )


def missing(name: str) -> NoReturn:
    """Raise the RequestInvalid of a field that has to be there."""
    raise RequestInvalid(f"The field {name} is required.", param=name)


def sampling_of(fields: SamplingFields) -> SamplingOverrides:
    """The request's own sampling values. Raises RequestInvalid naming one that is out of range."""
    values: dict[str, Any] = {}
    for name in _OVERRIDES:
        value = getattr(fields, name)
        key = (name, value) if isinstance(value, int) else None
        if key in _OFF:
            value = _OFF[key]
        if value is not None:
            _check_range(name, value)
        values[name] = value
    return SamplingOverrides(**values)


def bias_of(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """A `logit_bias` by token ids. Raises RequestInvalid for keys that are none, or name one twice.

    Ranges of ids and values are the engine's to check.
    """
    found: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10) or int(key) in found:
            raise RequestInvalid(
                f"logit_bias has the key {key[:40]!r}: give each token id once, as a number in"
                " quotes.",
                param="logit_bias",
            )
        found[int(key)] = value
    return tuple(found.items())


def budget_of(default: int, **given: int | None) -> int | None:
    """The token budget from fields that mean the same, else `default`; None is no limit.

    -1 means no limit, as in llama.cpp. Raises RequestInvalid for zero, other negative values, and
    fields that contradict each other.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if len(set(named.values())) > 1:
        spelled = " and ".join(f"{name} {value}" for name, value in named.items())
        raise RequestInvalid(
            f"{spelled} contradict each other: send one of them.", param=next(iter(named))
        )
    for name, value in named.items():
        if value == 0 or value < -1:
            raise RequestInvalid(
                f"{name} is {value}: give a whole number of at least 1, or leave it out.",
                param=name,
            )
    budget = next(iter(named.values()), default)
    return None if budget == -1 else min(budget, INT_MAX)


def stops_of(
    stop: str | list[str] | None, *, name: str = "stop", most: int = MAX_STOPS
) -> tuple[str, ...]:
    """The stop strings of the field `name`, `most` at most.

    Raises RequestInvalid for empty ones, too many, or too long ones.
    """
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > most:
        raise RequestInvalid(f"{name} has {len(stops)} strings: give {most} at most.", param=name)
    sizes = [len(text.encode()) for text in stops]
    if 0 in sizes:
        raise RequestInvalid(f"{name} has an empty string: remove it.", param=name)
    if max(sizes, default=0) > MAX_STOP_BYTES or sum(sizes) > MAX_STOPS_BYTES:
        raise RequestInvalid(
            f"{name} is too long: give at most {MAX_STOP_BYTES} bytes a string and"
            f" {MAX_STOPS_BYTES} bytes together.",
            param=name,
        )
    return stops


def logprobs_in_range(name: str, count: int) -> int:
    """`count` itself. Raises RequestInvalid unless it is from 0 to MAX_LOGPROBS."""
    if not 0 <= count <= MAX_LOGPROBS:
        raise RequestInvalid(
            f"{name} is {count}: give a whole number from 0 to {MAX_LOGPROBS}.", param=name
        )
    return count


def field_range(name: str) -> dict[str, float] | None:
    """`minimum` and `maximum` of a sampling field, spellings of "off" included; None for others."""
    if name not in _OVERRIDES:
        return None
    setting = _SETTINGS[name]
    low, high = setting.low, setting.high
    off = [value for field, value in _OFF if field == name]
    limits: dict[str, float] = {}
    if low is not None:
        limits["minimum"] = min(low, *off) if off else low
    if high is not None:
        limits["maximum"] = high
    return limits


def _check_range(name: str, value: float) -> None:
    setting = _SETTINGS[name]
    low, high = setting.low, setting.high
    if (low is not None and value < low) or (high is not None and value > high):
        raise RequestInvalid(f"{name} is {value}: give {setting.wanted}.", param=name)
