"""Grammars compiled for one vocabulary, and matchers that walk along them token by token.

llguidance does the work (docs/decisions/0012-grammars.md): it derives the allowed tokens of a state
lazily, so there is nothing to build a schema's size ahead, and it lets go of the interpreter's lock
meanwhile. Every bound on what a grammar may cost is in `grammar_text.work_limits`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from civetta.decode.grammar_text import engine_text, first_line, refuse, work_limits
from civetta.errors import ConstraintFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

    from civetta.chat.tokenizer import Tokenizer
    from civetta.types import Grammar

KEPT_GRAMMARS = 32
"""Compiled grammars that are kept for the next request with the same one."""


class Matcher:
    """A place in a grammar. One owner, one thread at a time.

    Of the `vocab_size` logits the first `n_tokens` belong to tokens, the others are padding.
    """

    __slots__ = ("_inner", "_n_tokens", "_vocab_size")

    def __init__(self, inner: LLMatcher, vocab_size: int, n_tokens: int) -> None:
        self._inner, self._vocab_size, self._n_tokens = inner, vocab_size, n_tokens

    def copy(self) -> Matcher:
        """Another matcher at the same place."""
        return Matcher(self._inner.deep_copy(), self._vocab_size, self._n_tokens)

    def allowed(self) -> NDArray[np.bool_]:
        """Tokens that may come next: bool [V]; end tokens where the text may end.

        Raises ConstraintFailed when the grammar is too costly here.
        """
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        if self._inner.is_error():
            self._fail()
        allowed_V: NDArray[np.bool_] = np.unpackbits(
            bits, count=self._vocab_size, bitorder="little"
        ).view(np.bool_)
        return allowed_V

    def take(self, token_id: int) -> bool:
        """Go on by a token; False, and no step, when the grammar has no such token here."""
        if token_id >= self._n_tokens:
            return False
        taken = self._inner.try_consume_tokens([token_id]) == 1
        if not taken and self._inner.is_error():
            self._fail()
        return taken

    def back(self, n_tokens: int) -> None:
        """Take the last tokens back."""
        self._inner.rollback(n_tokens)
        if self._inner.is_error():
            self._fail()

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self._inner.is_accepting())

    def _fail(self) -> NoReturn:
        raise ConstraintFailed(
            "The reply's grammar or schema became too costly to follow"
            f" ({first_line(self._inner.get_error())}): simplify it."
        )


class Grammars:
    """Compiles grammars for a tokenizer and logits of `vocab_size`. Safe between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiling, self._lock = threading.Lock(), threading.Lock()
        self._engine_tokens: LLTokenizer | None = None
        self._known: OrderedDict[Grammar, Matcher] = OrderedDict()

    def matcher(self, grammar: Grammar, param: str = "response_format") -> Matcher:
        """A matcher at the grammar's start.

        Raises RequestInvalid with code `invalid_schema`, naming `param`, for a grammar that is
        wrong, has no text, or costs too much to compile.
        """
        found = self._find(grammar)
        if found is None:
            with self._compiling:
                found = self._find(grammar) or self._compile(grammar, param)
                with self._lock:
                    self._known[grammar] = found
                    while len(self._known) > KEPT_GRAMMARS:
                        self._known.popitem(last=False)
        return found.copy()

    def _find(self, grammar: Grammar) -> Matcher | None:
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
            return self._known.get(grammar)

    def _compile(self, grammar: Grammar, param: str) -> Matcher:
        from llguidance import LLMatcher

        if self._engine_tokens is None:
            self._engine_tokens = _engine_tokens(self._tokenizer)
        text = engine_text(grammar, param)
        inner = LLMatcher(self._engine_tokens, text, log_level=0, limits=work_limits())
        if inner.is_error():
            refuse(inner.get_error(), param)
        matcher = Matcher(inner, self._vocab_size, self._tokenizer.vocab_size)
        try:  # a first mask, to see that there is one, and to have its work done for all copies
            possible = bool(matcher.allowed().any())
        except ConstraintFailed:
            message = inner.get_error()
            possible = "NoExtension" not in message
            if possible:
                refuse(f"it costs too much ({message})", param)
        if not possible:
            refuse("no text at all is possible", param)
        return matcher


class _EngineTokenizer:
    """A tokenizer as llguidance asks for one. Markers that readers see are plain text to it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_ids | tokenizer.eog_ids)

    def __call__(self, text: bytes | str) -> Sequence[int]:
        shown = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        return self._tokenizer.encode(shown)


def _engine_tokens(tokenizer: Tokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_EngineTokenizer(tokenizer)),
        eos_token=sorted(tokenizer.eog_ids),
    )
