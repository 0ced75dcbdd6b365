"""`SequenceState`: the small state of a sequence, as named tensors and numbers.

Whatever a model keeps per sequence besides pages is one of these, listed in `Session.states` under
a name. Snapshots, forks and the cache's files know no more than this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

SEPARATOR = "/"
"""Between a state's name and its part's, as in "recurrent/gdn.0.s"."""


class SequenceState(Protocol):
    """State that a snapshot copies."""

    def numbers(self) -> dict[str, int]:
        """Counters that decide how the tensors are read."""
        ...

    def set_numbers(self, numbers: Mapping[str, int]) -> None:
        """Take over the counters of another sequence; `parts` then has that one's shapes."""
        ...

    def parts(self, position: int) -> dict[str, Tensor]:
        """Views of all that matters `position` tokens into the sequence; `copy_` restores them."""
        ...

    def rewind(self, tokens: int, position: int, /) -> None:
        """Take back the newest `tokens` <= REWIND_ROWS tokens; `position` of them are left."""
        ...


def all_numbers(states: Mapping[str, SequenceState]) -> dict[str, int]:
    """The counters of every state under `state/counter`."""
    return {
        f"{name}{SEPARATOR}{key}": value
        for name, state in states.items()
        for key, value in state.numbers().items()
    }


def set_all_numbers(states: Mapping[str, SequenceState], numbers: Mapping[str, int]) -> None:
    """Hand every state its counters, named as `all_numbers` names them."""
    for name, state in states.items():
        prefix = f"{name}{SEPARATOR}"
        state.set_numbers(
            {key.removeprefix(prefix): n for key, n in numbers.items() if key.startswith(prefix)}
        )


def all_parts(states: Mapping[str, SequenceState], position: int) -> dict[str, Tensor]:
    """The tensors of every state under `state/part`; views."""
    return {
        f"{name}{SEPARATOR}{key}": tensor
        for name, state in states.items()
        for key, tensor in state.parts(position).items()
    }
