"""The form of a setting: how it is spelled, explained and checked. The settings are in `options.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field: how it is spelled, explained and checked. `low` and `high` are inclusive.

    `kind` is int, float, str or bool, from the field's annotation. Without a metavar an int counts
    how often its flag appears.
    """

    topic: str
    name: str
    kind: str
    default: Any
    flags: tuple[str, ...]
    metavar: str
    help: str
    low: float | None = None
    high: float | None = None
    excluded: tuple[int, ...] = ()  # values between low and high that mean nothing
    choices: tuple[str, ...] = ()
    pattern: str = ""  # for str: what the whole value has to match
    expects: str = ""  # the cure in words, where the range or the choices do not say it
    env: tuple[str, ...] = ()  # further environment names, weaker than the CIVETTA_ one
    many: bool = False  # a tuple of such values: flag repeated, environment split at spaces

    @property
    def env_names(self) -> tuple[str, ...]:
        """Environment variables that set it, strongest first."""
        return (f"CIVETTA_{self.name.upper()}", *self.env)

    @property
    def wanted(self) -> str:
        """What a value has to be, in words that follow "give"."""
        if self.expects:
            return self.expects
        if self.kind == "bool":
            return "true or false"
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        noun = {"int": "a whole number", "float": "a number"}.get(self.kind, "a text")
        if self.low is None:
            return noun
        if self.high is None or self.high == INT_MAX:
            return f"{noun} of at least {self.low:g}"
        high = f"{self.high:g}" if self.kind == "float" else str(self.high)
        return f"{noun} from {self.low:g} to {high}"


def setting(default: T, flags: str, help: str, **more: Any) -> T:  # noqa: A002
    """A dataclass field that is a setting; `flags` are its spellings and, last, its metavar."""
    value: T = field(default=default, metadata={"flags": flags.split(), "help": help, **more})
    return value
