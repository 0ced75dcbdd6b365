"""Text to token ids and back: byte-level BPE split at added tokens (model.md A.9)."""

from __future__ import annotations

import codecs
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from civetta.chat.vocabulary import Vocabulary, byte_alphabet, read_folder, read_gguf
from civetta.errors import RequestInvalid, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

END_TOKENS = ("<|im_end|>", "<|endoftext|>")
# Text that the reply parser reads; never hidden, whichever flag a file gives these tokens.
REPLY_MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip

MAX_PIECE_CHARS = 1 << 20
"""A text without a place to cut it for so long is refused: it takes seconds and much memory."""
PIECE_CHARS = 16_384
"""A long text goes to the library in pieces, so that what it holds meanwhile stays small."""
LOCKED_CHARS = 4096
"""The library's plain call holds the interpreter's lock; longer pieces go by the one that lets go
(a word of a million characters held all other threads up for 2.3 s, and now for 0.03 s)."""
# Between these characters every match of the split pattern ends, and nothing composes: the same ids.
_PIECE_BORDER = re.compile(r"(?<=\n)(?=[^\W_])|(?<=[A-Za-z])(?= [A-Za-z])")


class Tokenizer:
    """One model's tokenizer; immutable, safe to share between threads.

    Attributes: `vocab_size` ids from 0 (the embedding may be padded beyond it); `specials` token
    text to id of every added token; `control_ids` the hidden ones among them; `eos_id` the end
    token that the file names first; `eog_ids` every id that ends a reply; `named_tokens`
    `eos_token`, `bos_token`, `pad_token` as templates expect them.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bpe = vocabulary.bpe
        self._tokens = vocabulary.tokens
        self._bytes: dict[int, bytes] = {}
        self._alphabet = byte_alphabet()
        added = vocabulary.added
        for token in added:
            self._bytes[token.id] = token.text.encode()
        self.vocab_size = len(vocabulary.tokens)
        self.specials: Mapping[str, int] = MappingProxyType({t.text: t.id for t in added})
        self.control_ids = frozenset(
            token.id for token in added if token.control and token.text not in REPLY_MARKERS
        )
        self.named_tokens: Mapping[str, str] = MappingProxyType(dict(vocabulary.named))
        known_ends = [self.specials[text] for text in END_TOKENS if text in self.specials]
        ends = [*vocabulary.end_ids, *known_ends]
        if not ends:
            raise TokenizerError(
                f"The tokenizer names no end token and has none of {', '.join(END_TOKENS)}."
            )
        self.eos_id = ends[0]
        self.eog_ids = frozenset(ends)
        # In the byte alphabet a token's text has a character a byte.
        spelled = (len(text.encode()) for text in (*self._tokens, *self.specials) if text)
        self._longest_bytes = max(spelled, default=1)
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """The tokenizer of a Hugging Face folder; raises TokenizerError."""
        return cls(read_folder(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Self:
        """The tokenizer in GGUF metadata, ids as in the file; raises TokenizerError."""
        return cls(read_gguf(metadata))

    def encode(
        self, text: str, *, parse_special: bool = True, literal_starts: Collection[int] = ()
    ) -> list[int]:
        """Token ids of `text`; no token is put before or after it.

        With `parse_special` the text of an added token becomes that token, except where it begins
        at a character offset in `literal_starts` (`Rendered.literal_starts`: written by a user);
        without it every such text is ordinary text. Raises RequestInvalid for lone surrogates.
        """
        if not parse_special:
            return self._encode_plain(text)
        ids: list[int] = []
        done = position = 0
        while (match := self._split.search(text, position)) is not None:
            if match.start() in literal_starts:
                position = match.start() + 1
                continue
            ids += self._encode_plain(text[done : match.start()])
            ids.append(self.specials[match[0]])
            done = position = match.end()
        return ids + self._encode_plain(text[done:])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that has no text (unused, embedding padding).

        Raises TokenizerError for a negative id.
        """
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        if token_id < 0:
            raise TokenizerError(f"{token_id} is no token id; ids count from 0.")
        text = self._tokens[token_id] if token_id < self.vocab_size else None
        value = b"" if text is None else self._spelled_bytes(text)
        self._bytes[token_id] = value
        return value

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        `skip_special` leaves out control tokens; the markers of reasoning and tool calls stay.
        """
        hidden = self.control_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode(
            "utf-8", errors="replace"
        )

    def special_id(self, text: str) -> int:
        """Id of the added token `text`; raises TokenizerError when the vocabulary lacks it."""
        token_id = self.specials.get(text)
        if token_id is None:
            raise TokenizerError(f"The tokenizer has no token {text!r}, which this model needs.")
        return token_id

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, without encoding it.

        No token has more bytes than the longest one, and composing characters (NFC) leaves at
        least half as many bytes as there were characters.
        """
        return len(text) // (2 * self._longest_bytes)

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(text):
            border = _PIECE_BORDER.search(text, start + PIECE_CHARS)
            end = border.start() if border else len(text)
            if end - start > MAX_PIECE_CHARS:
                raise RequestInvalid(
                    f"The text has more than {MAX_PIECE_CHARS} characters without a line break or a"
                    " space between words; send it in lines, or less of it."
                )
            ids += self._encode_piece(text[start:end])
            start = end
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        try:
            if len(text) > LOCKED_CHARS:
                (encoded,) = self._bpe.encode_batch_fast([text], add_special_tokens=False)
                return encoded.ids
            return self._bpe.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # what the library says to text that is no Unicode
            place = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if place is None:
                raise
            raise RequestInvalid(
                f"The text has half of a surrogate pair ({text[place]!a}); send valid Unicode."
            ) from error

    def _spelled_bytes(self, text: str) -> bytes:
        try:
            return bytes(map(self._alphabet.__getitem__, text))
        except KeyError:  # a token spelled outside the byte alphabet stands for its own text
            return text.encode()


class IncrementalDecoder:
    """Turns tokens into text as they come, never emitting part of a character.

    The texts joined, `flush` included, equal `Tokenizer.decode` of the same ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.control_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """U+FFFD for an incomplete character at the end, else ""; the decoder starts afresh."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
