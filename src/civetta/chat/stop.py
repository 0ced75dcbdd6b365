"""Stop strings over a stream of text: an Aho-Corasick automaton, so that no part of one is shown.

The stop string that is complete first wins; of several that end at one character the longest.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopMatcher:
    """Passes text through until a stop string is complete; that string never appears, not in part.

    `hit` is the stop string found, None before. What `push` and `flush` returned, joined, is the
    text before it. Raises RequestInvalid for an empty stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.hit: str | None = None
        self._held = ""
        self._state = 0
        # state = node of the trie; a node's depth is the number of characters that must wait
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fallback = self._link()

    def push(self, text: str) -> str:
        """The text that is certain now; "" once a stop string was found."""
        if self.hit is not None:
            return ""
        if len(self._next) == 1:
            return text
        held = self._held + text
        offset = len(self._held)
        for index, char in enumerate(text):
            self._step(char)
            found = self._found[self._state]
            if found is not None:
                self.hit = found
                self._held = ""
                return held[: offset + index + 1 - len(found)]
        keep = len(held) - self._depth[self._state]
        self._held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        """What was held back, certain now that the text has ended."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, char: str) -> None:
        state = self._state
        while char not in self._next[state] and state:
            state = self._fallback[state]
        self._state = self._next[state].get(char, 0)

    def _add(self, stop: str) -> None:
        if not stop:
            raise RequestInvalid(
                "A stop string is empty; give at least one character.", param="stop"
            )
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = self._next[node][char]
        self._found[node] = stop

    def _link(self) -> list[int]:
        # breadth first: a node falls back to the longest proper suffix that is in the trie
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                state = fallback[node]
                while char not in self._next[state] and state:
                    state = fallback[state]
                fallback[child] = self._next[state].get(char, 0)
                if self._found[child] is None:  # a shorter stop string may end here
                    self._found[child] = self._found[fallback[child]]
                queue.append(child)
        return fallback
