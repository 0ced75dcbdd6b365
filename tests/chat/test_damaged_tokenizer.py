"""Tokenizer files of any content load or are refused in one sentence; they never fail otherwise."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chat.vocabularies import gguf_metadata, tokenizer_json, write_folder
from civetta.chat.tokenizer import Tokenizer
from civetta.errors import TokenizerError

if TYPE_CHECKING:
    from pathlib import Path

FUZZ = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
JUNK = st.sampled_from(
    [
        None, True, 0, -1, 7, 1 << 31, 1 << 63, 1 << 70, 0.5, float("nan"), "", "a", "<|im_end|>",
        [], [[]], [1], ["a", "b"], [None], {}, {"a": 1}, {"²": {"content": "x"}}, {"content": 3},
    ]
)  # fmt: skip
FILES = {
    "tokenizer.json": tokenizer_json(),
    "tokenizer_config.json": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"300": {}}},
    "generation_config.json": {"eos_token_id": [260, 261]},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a JSON document, without its root."""
    found = [path] if path else []
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    if isinstance(inner, dict):
        for key, item in inner.items():
            found += places(item, (*path, key))
    return found


def survives(load: Any) -> bool:
    """Whether the tokenizer loads; if so, it is used."""
    try:
        tokenizer = load()
    except TokenizerError:
        return False
    tokenizer.decode(tokenizer.encode("Hi <|im_start|>é\n 12"))
    tokenizer.decode(range(tokenizer.vocab_size))
    return True


SPOTS = [(name, path) for name, document in FILES.items() for path in places(document)]
# the vocabulary has most values; each kind of place is to be met as often as any other
RARE = [spot for spot in SPOTS if "vocab" not in spot[1][:-1]]


@FUZZ
@given(st.one_of(st.sampled_from(RARE), st.sampled_from(SPOTS)), JUNK)
def test_any_value_of_a_folder_loads_or_is_refused(
    tmp_path: Path, spot: tuple[str, tuple[Any, ...]], value: Any
) -> None:
    name, (*way, last) = spot
    for file, document in FILES.items():
        changed = copy.deepcopy(document)
        if file == name:
            holder: Any = changed
            for key in way:
                holder = holder[key]
            holder[last] = value
        (tmp_path / file).write_text(json.dumps(changed))
    survives(lambda: Tokenizer.from_folder(tmp_path))


@FUZZ
@given(st.sampled_from(sorted(gguf_metadata())), JUNK)
def test_any_value_of_gguf_metadata_loads_or_is_refused(key: str, value: Any) -> None:
    metadata = gguf_metadata() | {key: np.array(value) if value == [1] else value}
    survives(lambda: Tokenizer.from_gguf(metadata))


@pytest.mark.parametrize("index", [-1, 1 << 31, 1 << 63, "1", None, True, 0.5])
def test_ids_that_are_none_are_refused_before_a_table_is_made(tmp_path: Path, index: Any) -> None:
    document = copy.deepcopy(tokenizer_json())
    document["model"]["vocab"]["!"] = index
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match="gives the token '!' the id"):
        Tokenizer.from_folder(tmp_path)


def test_two_tokens_of_one_id_are_refused(tmp_path: Path) -> None:
    document = copy.deepcopy(tokenizer_json())
    document["model"]["vocab"]["!"] = document["model"]["vocab"]["A"]
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match="the same id"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_json_is_refused(tmp_path: Path, opening: str) -> None:
    (tmp_path / "tokenizer.json").write_text(opening * 50_000)
    with pytest.raises(TokenizerError, match="cannot be read as JSON"):
        Tokenizer.from_folder(tmp_path)


def test_end_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 99999999}')
    with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id has 99999999"):
        Tokenizer.from_folder(tmp_path)
