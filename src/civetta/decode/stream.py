"""Token by token to text that is certain: byte-safe, and cut before a stop string.

Two stages hold text back: the decoder until a character's bytes are complete, the matcher while
the text's end could begin a stop string. What was held and turns out harmless comes out later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.chat.stop import StopMatcher
from civetta.chat.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from civetta.chat.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CertainText:
    """What one token made certain; `stop` is the stop string that it completed."""

    text: str
    stop: str | None = None


class TokenText:
    """Text of one request. Without a tokenizer all text is empty and stop strings are refused."""

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...] = ()) -> None:
        assert tokenizer is not None or not stops, "stop strings need a tokenizer"
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer)
        self._stops = StopMatcher(stops)

    def push(self, token_id: int) -> CertainText:
        """Add a generated token; none may be added after a stop string."""
        assert self._stops.hit is None, "text does not go on after a stop string"
        if self._decoder is None:
            return CertainText(text="")
        return self._scan(self._decoder.push(token_id))

    def finish(self) -> CertainText:
        """Give out what is held back; nothing after a stop string.

        An incomplete character at the end becomes U+FFFD.
        """
        if self._decoder is None or self._stops.hit is not None:
            return CertainText(text="")
        last = self._scan(self._decoder.flush())
        if last.stop is not None:
            return last
        return CertainText(text=last.text + self._stops.flush())

    def _scan(self, text: str) -> CertainText:
        certain = self._stops.push(text)
        return CertainText(text=certain, stop=self._stops.hit)
