"""Typed access to the key-value pairs of a configuration; each refusal names the key."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from civetta.errors import CheckpointMalformed


class Keys:
    """Typed access to a mapping; every refusal names the key and the file kind."""

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def get(self, key: str) -> object | None:
        """The value, None when absent."""
        return self.values.get(self.prefix + key)

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31
    ) -> int:
        """A required integer, or `default` when the format states one; raises CheckpointMalformed."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; raises CheckpointMalformed."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers, None when absent; raises CheckpointMalformed."""
        value = self.get(key)
        if value is None:
            return None
        items: object = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(items, list | tuple):
            raise self.wrong(key, value, "a list of integers")
        numbers = [x for x in items if isinstance(x, int)]
        if len(numbers) != len(items):
            raise self.wrong(key, value, "a list of integers")
        return tuple(numbers)

    def fixed(self, key: str, accepted: tuple[object, ...]) -> None:
        """Refuse a value that is given and not one of `accepted`; raises CheckpointMalformed."""
        value = self.get(key)
        if value is not None and value not in accepted:
            raise self.wrong(key, value, "one of " + ", ".join(map(repr, accepted)))

    def wrong(self, key: str, value: object, wanted: str) -> CheckpointMalformed:
        """The refusal of a value."""
        found = "is missing" if value is None else f"is {str(value)[:60]!r}"
        return CheckpointMalformed(
            f"{self.where}: {self.prefix}{key} {found}, but must be {wanted};"
            " the file is damaged or made for another program"
        )


def mapping(value: object, key: str, where: str) -> Mapping[str, object]:
    """A nested object; raises CheckpointMalformed when `value` is none."""
    if not isinstance(value, Mapping):
        raise CheckpointMalformed(f"{where}: {key} is missing or no object; the file is damaged")
    return value
