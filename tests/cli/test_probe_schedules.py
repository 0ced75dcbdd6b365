"""`civetta probe` prints one hash while another request gathers rows at any point of its run.

The other request is played from inside: before or after a call that the model makes of its feed,
it asks for rows, reads ahead, takes what it asked for or gives it up. Its tokens are drawn from the
same text, so that it claims rows which were read ahead for the probe and the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import transformers_oracle as oracle
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_probe import run, token_file

from civetta.ngram.feed import RowFeed
from civetta.ngram.reader import available_kinds

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from civetta.ngram.feed import RowTicket

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB = 320
TOKENS = 360
PROMPT = 350
TEXT = np.random.default_rng(5).integers(0, VOCAB, TOKENS).tolist()
TEXT[192:256] = TEXT[64:128]  # the same piece after other tokens: its first rows are others
BATCHES = (16, 17, 64, 100, 350, 4096)

Act = Literal["begin", "prefetch", "take", "cancel"]
Move = tuple[Act, int, int]
"""What the other request does, and which tokens of the text it does it with: start and count."""


class Other:
    """A second request over the same feed. Its rows have to be those that nobody disturbed."""

    def __init__(self, moves: dict[int, list[Move]]) -> None:
        self._moves = moves
        self._asked: list[tuple[RowTicket, int, int]] = []
        self._calls = 0
        self.taken: list[tuple[int, int, torch.Tensor]] = []  # start, count, rows

    def turn(self, feed: RowFeed) -> None:
        """Everything that was drawn for this point."""
        for act, start, count in self._moves.get(self._calls, ()):
            history, ids = TEXT[:start], TEXT[start : start + count]
            if act == "begin":
                self._asked.append((feed.begin(ids, history), start, count))
            elif act == "prefetch":
                feed.prefetch(ids, history)
            elif self._asked:
                ticket, asked, size = self._asked.pop(0)
                if act == "take":
                    self.taken.append((asked, size, feed.take(ticket)))
                else:
                    ticket.cancel()
        self._calls += 1
        feed.check()


def played(patch: pytest.MonkeyPatch, other: Other) -> None:
    """Let `other` move before and after every call of a feed that is not its own."""
    busy = False

    def around(name: str) -> None:
        real = getattr(RowFeed, name)

        def call(feed: RowFeed, *args: Any) -> Any:
            nonlocal busy
            if busy:
                return real(feed, *args)
            busy = True
            try:
                other.turn(feed)
                found = real(feed, *args)
                other.turn(feed)
            finally:
                busy = False
            return found

        patch.setattr(RowFeed, name, call)

    for name in ("begin", "take", "prefetch"):
        around(name)


@st.composite
def moves(draw: st.DrawFn) -> dict[int, list[Move]]:
    """Moves by the number of the point at which they are made."""
    starts = st.one_of(st.sampled_from([0, *BATCHES[:4], 192, PROMPT]), st.integers(0, TOKENS - 1))
    counts = st.one_of(st.sampled_from(BATCHES[:5]), st.integers(1, 20))
    acts = st.sampled_from(["begin", "prefetch", "take", "cancel"])
    planned = draw(
        st.lists(st.tuples(st.integers(0, 60), acts, starts, counts), min_size=1, max_size=24)
    )
    found: dict[int, list[Move]] = defaultdict(list)
    for at, act, start, count in planned:
        found[at].append((act, start, min(count, TOKENS - start)))  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = oracle.text_config(
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "indexed_attention"],
        num_experts=4,
    )
    return oracle.save(oracle.random_model(config, seed=3), tmp_path_factory.mktemp("schedules"))


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("ids")
    return [
        "-m", str(model),
        "--tokens", token_file(folder / "prompt", TEXT[:PROMPT]),
        "--decode-tokens", token_file(folder / "tail", TEXT[PROMPT:]),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(files: list[str]) -> str:
    """The hash of a run from memory, which no gather can come between."""
    found = run(*files, "--ngram-placement", "ram")["sha256"]
    assert isinstance(found, str)
    return found


@settings(max_examples=40, deadline=None)
@given(
    plan=moves(),
    batch=st.sampled_from(BATCHES),
    reader=st.sampled_from(available_kinds()),
    prefetch=st.sampled_from(["on", "off"]),
    cache_mib=st.sampled_from(["0", "8"]),
    warm=st.booleans(),
)
@example(
    plan={0: [("prefetch", 192, 64)]},
    batch=64, reader="python", prefetch="on", cache_mib="8", warm=False,
)  # fmt: skip
def test_no_gather_of_another_request_changes_the_hash(
    files: list[str],
    alone: str,
    plan: dict[int, list[Move]],
    *,
    batch: int,
    reader: str,
    prefetch: str,
    cache_mib: str,
    warm: bool,
) -> None:
    """Any moves at any points, any batch, reader and cache, cold, or warm from the whole text."""
    if warm:
        plan = {**plan, 0: [("begin", 0, TOKENS), ("take", 0, 0), *plan.get(0, [])]}
    other = Other(plan)
    with pytest.MonkeyPatch.context() as patch:
        played(patch, other)
        found = run(
            *files, "--batch", str(batch), "--ngram-placement", "disk", "--ngram-reader", reader,
            "--ngram-prefetch", prefetch, "--ngram-cache-mib", cache_mib,
        )  # fmt: skip
    assert found["sha256"] == alone
    rows: dict[int, torch.Tensor] = {}
    for start, count, values in other.taken:
        for n in range(count):
            known = rows.setdefault(start + n, values[n])
            assert known.equal(values[n]), "the other request got other rows of the same token"
