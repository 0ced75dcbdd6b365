"""What a `Guide` has to know of a vocabulary; made once a model, shared by all replies."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from civetta.chat.reply import THINK_CLOSE
from civetta.chat.tools import CALL_OPEN
from civetta.decode.guide import LEAD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from civetta.chat.tokenizer import Tokenizer

_NONE = np.empty(0, np.int64)


class GuideTokens:
    """Token texts, end tokens, forced runs, and tokens that reach over the end of a marker."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.control_ids
        self.end_ids = frozenset(tokenizer.eog_ids)
        self.end_ids_N = np.array(sorted(self.end_ids), np.int64)
        self.lead_ids = tuple(tokenizer.encode(LEAD))
        self.close_ids = tuple(tokenizer.encode(THINK_CLOSE))
        self.break_ids = tuple(tokenizer.encode(f"\n{THINK_CLOSE}"))

    def text(self, token_id: int) -> bytes:
        """The bytes that a reader of the reply sees of a token."""
        return b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)

    def crossing(self, marker: str | None, tail: bytes) -> NDArray[np.int64]:
        """Tokens that complete the marker behind `tail` and have more text: int64 [N]."""
        if marker is None:
            return _NONE
        word = marker.encode()
        begun = next((k for k in range(len(word) - 1, 0, -1) if tail.endswith(word[:k])), 0)
        crossing = self._crossing[marker]
        return np.concatenate([crossing[0], crossing[begun]]) if begun else crossing[0]

    @cached_property
    def _crossing(self) -> dict[str, list[NDArray[np.int64]]]:
        """By marker, and by how many of its bytes stand before the token."""
        texts = [self.text(i) for i in range(self._tokenizer.vocab_size)]
        found: dict[str, list[NDArray[np.int64]]] = {}
        for marker in (THINK_CLOSE, CALL_OPEN):
            word = marker.encode()
            rows = [[i for i, text in enumerate(texts) if word in text[:-1]]]
            for begun in range(1, len(word)):
                rest = word[begun:]
                rows.append(
                    [i for i, t in enumerate(texts) if len(t) > len(rest) and t.startswith(rest)]
                )
            found[marker] = [np.array(row, np.int64) for row in rows]
        return found
