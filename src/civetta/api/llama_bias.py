"""`logit_bias` as llama.cpp takes it: pairs or an object, by token id or by text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from civetta.decode.limits import BIAS_LIMIT
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from civetta.chat.tokenizer import Tokenizer

TEXT_CHARS_MAX = 1024


def llama_bias(
    given: list[Any] | dict[str, Any] | None, tokenizer: Tokenizer
) -> tuple[tuple[int, float], ...]:
    """Biases by token id: a text stands for each of its tokens, and biases of one token add up.

    `false` for a bias is the strongest one against the token. Raises RequestInvalid; ranges of ids
    and values are the engine's to check.
    """
    pairs = list(given.items()) if isinstance(given, dict) else given or []
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            _refuse()
        for token_id in _ids_of(pair[0], tokenizer, numbers_in_text=isinstance(given, dict)):
            found[token_id] = found.get(token_id, 0.0) + _value_of(pair[1])
    return tuple(found.items())


def _ids_of(key: Any, tokenizer: Tokenizer, *, numbers_in_text: bool) -> list[int]:
    if isinstance(key, int) and not isinstance(key, bool):
        return [key]
    if not isinstance(key, str) or not key or len(key) > TEXT_CHARS_MAX:
        _refuse()
    if numbers_in_text and key.isascii() and key.isdigit() and len(key) < 10:
        return [int(key)]
    return tokenizer.encode(key, parse_special=False)


def _value_of(value: Any) -> float:
    if value is False:
        return -BIAS_LIMIT
    if value is True or not isinstance(value, (int, float)):
        _refuse()
    return float(value)


def _refuse() -> NoReturn:
    raise RequestInvalid(
        "logit_bias has to be pairs of a token id or a text and a number or false, or an object of"
        f" them; a text has 1 to {TEXT_CHARS_MAX} characters.",
        param="logit_bias",
    )
