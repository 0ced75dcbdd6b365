from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from civetta.chat.stop import StopMatcher
from civetta.errors import RequestInvalid

SMALL = st.text(alphabet="ab\n", min_size=1, max_size=5)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Grow the text a character at a time; stop at the first that is complete, longest first."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(chunks: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = [matcher.push(chunk) for chunk in chunks]
    out.append(matcher.flush())
    return out, matcher.hit


@given(
    st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12),
    st.lists(SMALL, max_size=4, unique=True),
)
def test_equals_naive_search_for_any_chunks(chunks, stops):
    out, hit = run(chunks, stops)
    assert ("".join(out), hit) == naive("".join(chunks), stops)


@given(st.text(alphabet="ab", max_size=20), st.lists(SMALL, min_size=1, max_size=4, unique=True))
def test_holds_back_exactly_the_longest_tail_that_may_still_match(text, stops):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(char) for char in text)
    if matcher.hit is None:
        tails = [text[-n:] for n in range(1, len(text) + 1)]
        live = [t for t in tails if any(stop.startswith(t) and stop != t for stop in stops)]
        assert text[len(shown) :] == max(live, key=len, default="")


@pytest.mark.parametrize(
    ("chunks", "stops", "text", "hit"),
    [
        (["alpha be", "ta ", "gamma"], ["beta gamma"], "alpha ", "beta gamma"),
        (["quick br", "own f", "ox"], ["own fox"], "quick br", "own fox"),
        (["hi\n", "User", ": x"], ["\nUser:"], "hi", "\nUser:"),
        (["hi\nUser"], ["\nUser:"], "hi\nUser", None),
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),  # the first one complete wins
        (["xab"], ["b", "ab"], "x", "ab"),  # of those that end together, the longest
        (["aab"], ["ab"], "a", "ab"),
        (["日本", "語"], ["本語"], "日", "本語"),
    ],
)
def test_examples(chunks, stops, text, hit):
    out, found = run(chunks, stops)
    assert ("".join(out), found) == (text, hit)


def test_nothing_more_comes_after_a_hit():
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_without_stops_text_passes_at_once():
    matcher = StopMatcher([])
    assert matcher.push("anything") == "anything"


def test_empty_stop_is_refused():
    with pytest.raises(RequestInvalid, match="stop string is empty"):
        StopMatcher(["a", ""])
