"""What one rendering of a chat template has used, and where it is stopped.

Counted are steps, characters built, nodes of containers and time on the processor. Time is the net
under the rest: it stops what is made of many small steps, each of which the other counts allow.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Sized

_CLOCK_EVERY = 256
_BITS_A_DIGIT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """What one rendering may use.

    `output_chars`: the text, and any one value. `built_chars`: all values together, which a
    template that adds message to message uses up with the square of their number. `steps`: loop
    turns, elements of ranges, calls and filters. `nodes`: elements of the lists and mappings that
    are made, nested ones included. `int_bits`: a whole number. `cpu_s`: seconds of one thread.
    """

    output_chars: int = 128 * 262_144  # 128 a token of the native context, as peers allow
    built_chars: int = 1 << 29
    steps: int = 2_000_000
    nodes: int = 1 << 24
    int_bits: int = 8192
    cpu_s: float = 5.0


class Meter:
    """Counts of one rendering. Every method raises SecurityError when a limit is passed."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._steps = self._nodes = self._built = 0
        self._until_clock = _CLOCK_EVERY
        self._ends_s = time.thread_time() + limits.cpu_s

    def spend(self, steps: int = 1) -> None:
        """Count steps, and look at the clock now and then."""
        self._steps += steps
        if self._steps > self._limits.steps:
            refuse(f"it takes more than {self._limits.steps} steps")
        self._until_clock -= 1
        if self._until_clock <= 0:
            self._until_clock = _CLOCK_EVERY
            if time.thread_time() > self._ends_s:
                refuse(f"it takes more than {self._limits.cpu_s:g} seconds")

    def check_size(self, chars: int) -> None:
        """Compare the length of one text or list with the limit."""
        if chars > self._limits.output_chars:
            refuse(f"it makes a text or list longer than {self._limits.output_chars}")

    def build(self, chars: int) -> None:
        """Count a text of at most `chars` characters, before or after it is made."""
        self.check_size(chars)
        self._built += chars
        if self._built > self._limits.built_chars:
            refuse(f"it makes texts of more than {self._limits.built_chars} characters in all")

    def check_int(self, bits: int) -> None:
        """Compare the size of a whole number with the limit."""
        if bits > self._limits.int_bits:
            refuse(f"it makes a whole number of more than {self._limits.int_bits} bits")

    def made(self, value: Any) -> Any:
        """`value`, counted: a text by its length, a container by all that is in it."""
        if isinstance(value, (str, bytes)):
            self.build(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.check_size(self.weigh(value))
        elif isinstance(value, int):
            self.check_int(value.bit_length())
        return value

    def weigh(self, value: Any) -> int:
        """Characters in a container, each as often as it would be printed; nodes are counted."""
        chars = 0
        pending = [value]
        while pending:
            item = pending.pop()
            self._nodes += 1
            if isinstance(item, (str, bytes)):
                chars += len(item)
            elif isinstance(item, int):
                chars += item.bit_length() // _BITS_A_DIGIT
            elif isinstance(item, dict):
                self._room_for(item, pending)
                pending += item
                pending += item.values()
            elif isinstance(item, (list, tuple)):
                self._room_for(item, pending)
                pending += item
            if self._nodes > self._limits.nodes:
                self._refuse_nodes()
        return chars

    def check_nodes(self, elements: int) -> None:
        """Compare the length of a list that is about to be made with what is left."""
        if self._nodes + elements > self._limits.nodes:
            self._refuse_nodes()

    def _room_for(self, item: Sized, pending: list[Any]) -> None:
        # before the queue grows by it
        self.check_nodes(len(pending) + len(item))

    def _refuse_nodes(self) -> NoReturn:
        refuse(f"it makes lists and mappings of more than {self._limits.nodes} elements")


class QuietNamespace(Namespace):
    """A namespace that prints without its contents, which may hold it again."""

    def __repr__(self) -> str:
        return "<Namespace>"


def refuse(what: str) -> NoReturn:
    """End the rendering, or the compiling, because of `what` the template does."""
    raise jinja2.exceptions.SecurityError(f"{what}, which is refused")
