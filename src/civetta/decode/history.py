"""What a request has said so far, counted the way its penalties need it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class TokenHistory:
    """Prompt and generated tokens of one request, with counts kept up to date token by token.

    The window is the last `repeat_last_n` tokens of prompt and generated text together (0: none,
    -1: all). Generated counts see this request's own tokens only. `append` and `rewind` undo each
    other, so that drafted tokens can be counted while they are verified. One owner, one thread.
    """

    __slots__ = ("_generated", "_prompt_tokens", "_repeat_last_n", "_tokens", "_window")

    def __init__(self, prompt_ids: Iterable[int], *, repeat_last_n: int) -> None:
        assert repeat_last_n >= -1, "a repeat window has a length, or -1 for everything"
        self._tokens = list(prompt_ids)
        self._prompt_tokens = len(self._tokens)
        self._repeat_last_n = repeat_last_n
        self._generated: Counter[int] = Counter()
        self._window: Counter[int] = Counter(self._tokens[self._window_start() :])

    def __len__(self) -> int:
        """Tokens of prompt and generated text."""
        return len(self._tokens)

    def append(self, token_id: int) -> None:
        """Count one more generated token."""
        before = self._window_start()
        self._tokens.append(token_id)
        self._generated[token_id] += 1
        if self._repeat_last_n == 0:
            return
        self._window[token_id] += 1
        if self._window_start() > before:
            _decrement(self._window, self._tokens[before])

    def rewind(self, n_tokens: int) -> None:
        """Forget the last n_tokens generated tokens."""
        generated = len(self._tokens) - self._prompt_tokens
        assert 0 <= n_tokens <= generated, "only generated tokens can be taken back"
        for _ in range(n_tokens):
            before = self._window_start()
            token_id = self._tokens.pop()
            _decrement(self._generated, token_id)
            if self._repeat_last_n == 0:
                continue
            _decrement(self._window, token_id)
            after = self._window_start()
            if after < before:
                self._window[self._tokens[after]] += 1

    def window_ids(self) -> NDArray[np.int64]:
        """Distinct tokens of the window, in no particular order: int64 [N]."""
        return np.fromiter(self._window, dtype=np.int64, count=len(self._window))

    def generated_counts(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Distinct generated tokens and how often each occurred: int64 [N], float64 [N]."""
        size = len(self._generated)
        ids_N = np.fromiter(self._generated, dtype=np.int64, count=size)
        return ids_N, np.fromiter(self._generated.values(), dtype=np.float64, count=size)

    def check(self) -> None:
        """Prove that the counts say what the tokens say."""
        assert self._window == Counter(self._tokens[self._window_start() :])
        assert self._generated == Counter(self._tokens[self._prompt_tokens :])

    def _window_start(self) -> int:
        if self._repeat_last_n < 0:
            return 0
        return max(0, len(self._tokens) - self._repeat_last_n)


def _decrement(counts: Counter[int], token_id: int) -> None:
    if counts[token_id] == 1:
        del counts[token_id]
    else:
        counts[token_id] -= 1
