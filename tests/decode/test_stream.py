from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from civetta.decode.stream import CertainText, TokenText
from engine.fakes import IM_END, ByteTokenizer

TOKENIZER = ByteTokenizer()


def run(data, stops=()):
    """All text of these bytes as tokens, and the stop string that hit."""
    stream, texts = TokenText(TOKENIZER, stops), []
    for token in data:
        certain = stream.push(token)
        texts.append(certain.text)
        if certain.stop is not None:
            assert stream.finish() == CertainText(text="")
            return texts, certain.stop
    last = stream.finish()
    return [*texts, last.text], last.stop


def first_stop(text, stops):
    """Where the text is cut, by looking at every prefix of it."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    st.text(alphabet="ab\u00e9\u6f22\U0001f600", max_size=20),
    st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=4), max_size=4),
)
def test_text_is_cut_before_the_first_stop_string(text, stops):
    texts, stop = run(text.encode(), tuple(stops))
    assert ("".join(texts), stop) == first_stop(text, stops)


@given(st.binary(max_size=12), st.sampled_from([(), ("\ufffd",), ("a\ufffd", "b")]))
def test_broken_bytes_are_replaced_and_can_stop(data, stops):
    texts, stop = run(data, stops)
    assert ("".join(texts), stop) == first_stop(data.decode(errors="replace"), stops)


def test_nothing_that_could_begin_a_stop_string_comes_out_early():
    texts, stop = run(b"xab abc", ("abc",))
    assert texts == ["x", "", "", "ab ", "", "", ""]
    assert stop == "abc"


def test_control_tokens_have_no_text():
    assert run([*b"a", IM_END, *b"b"]) == (["a", "", "b", ""], None)


def test_without_a_tokenizer_there_is_no_text():
    stream = TokenText(None)
    assert stream.push(5) == CertainText(text="")
    assert stream.finish() == CertainText(text="")
    with pytest.raises(AssertionError):
        TokenText(None, ("a",))


def test_nothing_follows_a_stop_string():
    stream = TokenText(TOKENIZER, ("a",))
    assert stream.push(97).stop == "a"
    with pytest.raises(AssertionError):
        stream.push(98)
