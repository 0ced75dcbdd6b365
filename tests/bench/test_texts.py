"""Texts that a session's stream may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from civetta.bench.case import token_stream
from civetta.bench.texts import MIXED, REPETITIVE, TEXTS, stream
from civetta.engine.load import read_text_side
from civetta.errors import UsageError
from civetta.model.build import check_checkpoint
from civetta.model.embedded import embedded_model_path

if TYPE_CHECKING:
    from civetta.chat.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = read_text_side(check_checkpoint(embedded_model_path()))[0]
    assert found is not None
    return found


def ids(kind: str, tokenizer: Tokenizer | None, session: int = 0, count: int = 300) -> list[int]:
    return stream(kind, seed=1, session=session, count=count, vocab=6144, tokenizer=tokenizer)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("count", [0, 1, 7, 5000])
def test_a_stream_has_the_length_asked_for_and_is_the_start_of_a_longer_one(
    tokenizer: Tokenizer, kind: str, count: int
) -> None:
    found = ids(kind, tokenizer, count=count)
    assert len(found) == count
    assert found == ids(kind, tokenizer, count=count + 100)[:count]


def test_sessions_have_places_of_their_own_and_texts_are_what_they_are_called(
    tokenizer: Tokenizer,
) -> None:
    for kind, parts in (("mixed", MIXED), ("repetitive", REPETITIVE)):
        texts = [tokenizer.decode(ids(kind, tokenizer, session, 60)) for session in range(3)]
        assert len(set(texts)) == 3
        for session, text in enumerate(texts):
            assert text.startswith(parts[(1 + session) % len(parts)][:20])


def test_random_ids_need_no_tokenizer_and_texts_do() -> None:
    assert ids("random", None) == token_stream(1, 0, 300, 6144)
    for kind in TEXTS[1:]:
        with pytest.raises(UsageError, match=f"--text {kind} needs a tokenizer"):
            ids(kind, None)
