from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from civetta.decode.history import TokenHistory

token = st.integers(0, 3)
moves = st.lists(
    token.map(lambda t: ("append", t)) | st.integers(0, 3).map(lambda n: ("rewind", n))
)


@given(st.lists(token, max_size=8), st.integers(-1, 6), moves)
def test_counts_follow_every_append_and_rewind(prompt, last_n, steps):
    history = TokenHistory(prompt, repeat_last_n=last_n)
    generated: list[int] = []
    for kind, value in steps:
        if kind == "append":
            history.append(value)
            generated.append(value)
        else:
            n = min(value, len(generated))
            history.rewind(n)
            del generated[len(generated) - n :]
        history.check()
        everything = prompt + generated
        window = everything if last_n < 0 else everything[max(0, len(everything) - last_n) :]
        assert sorted(history.window_ids().tolist()) == sorted(set(window))
        ids, counts = history.generated_counts()
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            t: generated.count(t) for t in set(generated)
        }
        assert len(history) == len(everything)


def test_the_prompt_cannot_be_taken_back():
    history = TokenHistory([1, 2], repeat_last_n=4)
    history.append(3)
    with pytest.raises(AssertionError):
        history.rewind(2)


def test_window_length_is_checked():
    with pytest.raises(AssertionError):
        TokenHistory([], repeat_last_n=-2)
