"""`Guides`: makes the guide of a request, for one model's vocabulary."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

from civetta.decode.grammars import Grammars
from civetta.decode.guide import Guide
from civetta.decode.guide_tokens import GuideTokens
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from civetta.chat.tokenizer import Tokenizer
    from civetta.types import Constraint


class Guides:
    """Any thread may ask. The first guide takes as long as reading the vocabulary once."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()

    def of(
        self,
        *,
        thinking: bool,
        thinking_budget: int | None,
        constraint: Constraint | None,
        ends: bool = True,
    ) -> Guide | None:
        """A guide at the start of a reply; None when every token may come at any time.

        `ends` False: end tokens do not end the reply.
        Raises RequestInvalid for a grammar that cannot be carried out.
        """
        if thinking_budget is None and constraint is None:
            return None
        with self._lock:
            grammars, tokens = self._made
        start = None
        if constraint is not None:
            start = grammars.matcher(constraint.grammar, constraint.param)
        return Guide(
            tokens,
            thinking=thinking,
            thinking_budget=thinking_budget,
            constraint=constraint,
            start=start,
            ends=ends,
        )

    @cached_property
    def _made(self) -> tuple[Grammars, GuideTokens]:
        if self._tokenizer is None:
            raise RequestInvalid(
                "A thinking budget, an answer format and tools need a tokenizer, and this model's"
                " files have none; leave them out.",
                param="response_format",
            )
        return (
            Grammars(self._tokenizer, self._vocab_size),
            GuideTokens(self._tokenizer),
        )
