"""The vocabulary in a Hugging Face folder or in GGUF metadata, read into one form (model.md A.9).

Both kinds become a byte-level BPE over the same token ids plus the added tokens, which text splits
at before anything else happens. The normaliser and the split pattern are the model's, whatever a
file says, because the Hugging Face class of this model sets them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index as whole
from typing import TYPE_CHECKING, Any, TypeGuard

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from civetta.errors import TokenizerError

if TYPE_CHECKING:
    from pathlib import Path

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GGUF token types that matter here; 1 is an ordinary token
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_GGUF = "tokenizer.ggml."
_ID = re.compile(r"[0-9]{1,9}")
MAX_IDS = 1 << 22
"""Ceiling on token ids, far above the model's 248,320: a table of them is made."""
MAX_JSON_BYTES = 64_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that text is split at. `control` marks structure, which is hidden from readers."""

    id: int
    text: str
    control: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything a tokenizer needs from a file.

    `tokens[id]` is the byte-level spelling of an ordinary token, None where the id has none (gaps,
    unused and added ids). `named` maps `eos_token`, `bos_token`, `pad_token` to token texts, as far
    as the file names them; `end_ids` are the end tokens the file names.
    """

    bpe: BpeTokenizer
    tokens: Sequence[str | None]
    added: tuple[AddedToken, ...]
    named: Mapping[str, str] = field(default_factory=dict)
    end_ids: tuple[int, ...] = ()


def byte_alphabet() -> dict[str, int]:
    """The 256 characters that byte-level BPE spells bytes with: character to byte.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 onwards.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def read_folder(folder: Path) -> Vocabulary:
    """The vocabulary of a Hugging Face folder: tokenizer.json, and tokenizer_config.json and
    generation_config.json where they are present.

    Raises TokenizerError when a file is missing, no byte-level BPE, or contradicts another.
    """
    path = folder / "tokenizer.json"
    document = _read_json(path)
    config = _read_json(folder / "tokenizer_config.json", absent={})
    generation = _read_json(folder / "generation_config.json", absent={})
    model = document.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"{path} holds no BPE model; civetta reads byte-level BPE only.")
    if model.get("byte_fallback") or model.get("continuing_subword_prefix"):
        raise TokenizerError(
            f"{path} holds a BPE with byte fallback or word prefixes, not a byte-level one."
        )
    vocab = _folder_vocab(model.get("vocab"), path)
    merges = [_merge_pair(merge, path) for merge in _list(model, "merges", path)]
    added = _folder_added_tokens(document, config, path)
    size = max([*vocab.values(), *(token.id for token in added)], default=-1) + 1
    tokens: list[str | None] = [None] * size
    for text, index in vocab.items():
        tokens[index] = text
    named = _named_tokens(config)
    ids = vocab | {token.text: token.id for token in added}
    ends = [ids[named["eos_token"]]] if named.get("eos_token") in ids else []
    ends += _configured_ends(generation, size, folder)
    return Vocabulary(
        bpe=_build_bpe(vocab, merges, str(path), ignore_merges=bool(model.get("ignore_merges"))),
        tokens=_without_added(tokens, added),
        added=added,
        named=named,
        end_ids=tuple(dict.fromkeys(ends)),
    )


def read_gguf(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary in the metadata of a GGUF file; ids are those of the file.

    Control tokens are added tokens that are hidden, user-defined ones added tokens that are shown;
    unused ids have no text. Raises TokenizerError when keys are missing or it is another kind.
    """
    kind, pre = metadata.get(f"{_GGUF}model"), metadata.get(f"{_GGUF}pre")
    if kind != "gpt2" or pre != "qwen35":
        raise TokenizerError(
            f"The GGUF tokenizer is {kind!r} with pre-tokenizer {pre!r}; civetta reads 'gpt2' with"
            " 'qwen35' only. Use a file converted from the model this engine serves."
        )
    tokens = _gguf_texts(metadata, "tokens")
    merges = [_merge_pair(merge, "GGUF") for merge in _gguf_array(metadata, "merges")]
    types = _gguf_numbers(metadata, "token_type")
    if len(types) != len(tokens):
        raise TokenizerError(
            f"The GGUF file has {len(tokens)} tokens but {len(types)} token types; it is damaged."
        )
    vocab = {text: index for index, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(text for index, text in enumerate(tokens) if vocab[text] != index)
        raise TokenizerError(f"The GGUF vocabulary lists the token {twice!r} twice.")
    added = tuple(
        AddedToken(id=index, text=tokens[index], control=kind == _CONTROL)
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    )
    spelled = [None if kind == _UNUSED else text for text, kind in zip(tokens, types, strict=True)]
    named, ends = _gguf_named_tokens(metadata, tokens)
    return Vocabulary(
        bpe=_build_bpe(vocab, merges, "GGUF metadata"),
        tokens=_without_added(spelled, added),
        added=added,
        named=named,
        end_ids=ends,
    )


def _read_json(path: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise TokenizerError(
                f"{path} is larger than {MAX_JSON_BYTES} bytes; no model needs it."
            )
        value = json.loads(raw.decode("utf-8"))
    except FileNotFoundError as error:
        if absent is not None:
            return absent
        raise TokenizerError(
            f"{path} is missing; download the tokenizer files beside the weights."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path} cannot be read as JSON: {error}; download the file again."
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object.")
    return value


def _list(holder: dict[str, Any], key: str, path: Path) -> list[Any]:
    value = holder.get(key) or []
    if not isinstance(value, list):
        raise TokenizerError(f"{path}: {key!r} is no list; download the file again.")
    return value


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_IDS


def _folder_vocab(value: object, path: Path) -> dict[str, int]:
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} has no vocabulary; download the file again.")
    for text, index in value.items():
        if not _is_id(index):
            raise TokenizerError(
                f"{path} gives the token {text[:80]!r} the id {str(index)[:40]}, but ids are whole"
                f" numbers from 0 to {MAX_IDS - 1}; download the file again."
            )
    if len(set(value.values())) != len(value):
        owner: dict[int, str] = {}
        for text, index in value.items():
            if owner.setdefault(index, text) != text:
                raise TokenizerError(
                    f"{path} gives the tokens {owner[index]!r} and {text!r} the same id {index};"
                    " download the file again."
                )
    return value


def _configured_ends(generation: dict[str, Any], size: int, folder: Path) -> list[int]:
    configured = generation.get("eos_token_id")
    if configured is None:
        return []
    ends = configured if isinstance(configured, list) else [configured]
    for end in ends:
        if not _is_id(end) or end >= size:
            raise TokenizerError(
                f"{folder / 'generation_config.json'}: eos_token_id has {str(end)[:40]}, which is"
                f" no id from 0 to {size - 1}; download the file again."
            )
    return ends


def _merge_pair(merge: object, source: Path | str) -> tuple[str, str]:
    if isinstance(merge, str):
        left, space, right = merge.partition(" ")
        if left and space and right:
            return left, right
    elif isinstance(merge, list) and len(merge) == 2:
        return str(merge[0]), str(merge[1])
    raise TokenizerError(f"{source} has a merge that is no pair: {merge!r}.")


def _build_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], source: str, ignore_merges: bool = False
) -> BpeTokenizer:
    missing = next((char for char in byte_alphabet() if char not in vocab), None)
    if missing is not None:
        raise TokenizerError(
            f"The vocabulary in {source} lacks the byte token {missing!r}; text could not be"
            " encoded without loss."
        )
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # what the library raises for bad merges
        raise TokenizerError(
            f"The merges in {source} do not fit its vocabulary: {error}."
        ) from error
    bpe = BpeTokenizer(model)
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def _folder_added_tokens(
    document: dict[str, Any], config: dict[str, Any], path: Path
) -> tuple[AddedToken, ...]:
    # tokenizer_config.json may name tokens that tokenizer.json lacks; where both speak they agree
    entries = list(_list(document, "added_tokens", path))
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise TokenizerError(
            f"{path.with_name('tokenizer_config.json')}: added_tokens_decoder is no object."
        )
    for key, entry in decoder.items():
        entries.append(
            {**entry, "id": int(key)} if isinstance(entry, dict) and _ID.fullmatch(key) else entry
        )
    added: dict[str, AddedToken] = {}
    for entry in entries:
        text, index = (
            (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else ("", -1)
        )
        if not isinstance(text, str) or not text or not _is_id(index):
            raise TokenizerError(f"{path} has an added token without text or id: {entry!r}.")
        if entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"):
            raise TokenizerError(
                f"{path} has the added token {text!r} with lstrip, rstrip or single_word, which"
                " civetta does not implement and this model does not use."
            )
        token = AddedToken(id=index, text=text, control=bool(entry.get("special")))
        if added.setdefault(text, token).id != index:
            raise TokenizerError(f"{path} and tokenizer_config.json give {text!r} different ids.")
    owners = {token.id: token.text for token in added.values()}
    if len(owners) != len(added):
        raise TokenizerError(f"{path} gives one id to two added tokens.")
    return tuple(added.values())


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[key] = text
    return named


def _gguf_array(metadata: Mapping[str, object], name: str) -> Sequence[Any]:
    value = metadata.get(_GGUF + name)
    if value is None or isinstance(value, (str, int, float)):
        raise TokenizerError(
            f"The GGUF metadata has no array {_GGUF}{name}; the file carries no complete tokenizer."
        )
    assert isinstance(value, Iterable)
    return value  # type: ignore[return-value]  # a list, numpy vector or lazy string array


def _gguf_texts(metadata: Mapping[str, object], name: str) -> list[str]:
    texts = list(_gguf_array(metadata, name))
    if not all(isinstance(text, str) for text in texts):
        raise TokenizerError(f"{_GGUF}{name} in the GGUF metadata is no array of texts.")
    return texts


def _gguf_numbers(metadata: Mapping[str, object], name: str) -> list[int]:
    try:
        return [whole(number) for number in _gguf_array(metadata, name)]
    except TypeError as error:
        raise TokenizerError(
            f"{_GGUF}{name} in the GGUF metadata is no array of whole numbers."
        ) from error


def _gguf_named_tokens(
    metadata: Mapping[str, object], tokens: Sequence[str]
) -> tuple[dict[str, str], tuple[int, ...]]:
    named: dict[str, str] = {}
    ends: list[int] = []
    keys = {
        "bos": "bos_token", "eos": "eos_token", "eot": "", "padding": "pad_token",
        "unknown": "unk_token",
    }  # fmt: skip
    for key, name in keys.items():
        index = metadata.get(f"{_GGUF}{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise TokenizerError(f"{_GGUF}{key}_token_id is {index!r}, outside the vocabulary.")
        if name:
            named[name] = tokens[index]
        if key in ("eos", "eot"):
            ends.append(index)
    return named, tuple(dict.fromkeys(ends))


def _without_added(
    tokens: list[str | None], added: tuple[AddedToken, ...]
) -> tuple[str | None, ...]:
    for token in added:
        tokens[token.id] = None
    return tuple(tokens)
