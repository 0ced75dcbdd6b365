"""Log-probabilities of tokens in the two spellings of the OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from civetta.types import TokenLogprob


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        ...


def chat_entry(tokens: TokenBytes, logprob: TokenLogprob) -> dict[str, Any]:
    """One item of `logprobs.content` in chat completions."""
    top = [_item(tokens, token_id, value) for token_id, value in logprob.top]
    return {**_item(tokens, logprob.token_id, logprob.logprob), "top_logprobs": top}


def llama_entry(tokens: TokenBytes, logprob: TokenLogprob) -> dict[str, Any]:
    """One item of llama.cpp's `completion_probabilities`."""
    top = [{"id": token_id, **_item(tokens, token_id, value)} for token_id, value in logprob.top]
    own = _item(tokens, logprob.token_id, logprob.logprob)
    return {"id": logprob.token_id, **own, "top_logprobs": top}


class LegacyLogprobs:
    """Collects the `logprobs` object of plain completions: parallel lists over tokens."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._lists: dict[str, list[Any]] = _empty()

    def add(self, logprob: TokenLogprob, text_offset: int) -> None:
        """Append one token; `text_offset` is where its text starts, in characters of the reply."""
        self.add_token(logprob.token_id, logprob, text_offset)

    def add_token(self, token_id: int, logprob: TokenLogprob | None, text_offset: int) -> None:
        """The same for a token that may have no probability, as the first of a prompt."""
        named = None
        if logprob is not None:
            named = {_spelled(self._tokens.token_bytes(key)): value for key, value in logprob.top}
        self._lists["tokens"].append(_spelled(self._tokens.token_bytes(token_id)))
        self._lists["token_logprobs"].append(None if logprob is None else logprob.logprob)
        self._lists["top_logprobs"].append(named)
        self._lists["text_offset"].append(text_offset)

    def take(self) -> dict[str, list[Any]] | None:
        """The object with what was added since the last call; None when that is nothing."""
        if not self._lists["tokens"]:
            return None
        taken, self._lists = self._lists, _empty()
        return taken


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _item(tokens: TokenBytes, token_id: int, value: float) -> dict[str, Any]:
    raw = tokens.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": value, "bytes": list(raw)}


def _spelled(raw: bytes) -> str:
    """The token's text; a token that is part of a character is spelled by its bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
