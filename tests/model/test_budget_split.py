"""A query that sees at most the budget takes all its keys, whatever launch it arrives in."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from civetta.kernels.select import REFERENCE
from civetta.model.build import load_trunk

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.model.trunk import Trunk

BUDGET, RATIO, TOKENS = 64, 4, 160
LAST_DENSE = BUDGET + RATIO - 2
"""The last position with no more complete blocks than the budget keeps: 16 and a tail of three."""


class Recorder:
    """Notes which positions take which path."""

    def __init__(self) -> None:
        self.dense: list[int] = []
        self.sparse: list[int] = []
        self.ops = replace(
            REFERENCE, attend_dense=self.attend_dense, attend_sparse=self.attend_sparse
        )

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: int) -> Tensor:
        self.dense += range(first, first + len(q))
        return REFERENCE.attend_dense(q, k, v, table, first)

    def attend_sparse(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, tokens: Tensor
    ) -> Tensor:
        self.sparse += [int(row.max()) if row[-1] >= 0 else -1 for row in tokens]
        assert ((tokens >= 0).sum(1) >= BUDGET).all()
        return REFERENCE.attend_sparse(q, k, v, table, tokens)


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, recorder: Recorder) -> Trunk:
    made = tiny.make(
        seed=6,
        layer_types=["full_attention", "linear_attention"],
        num_hidden_layers=2,
        indexer_budget=BUDGET,
    )
    folder = tmp_path_factory.mktemp("split") / "hf"
    tiny.write_hf(folder, made.config, tiny.stored(made.tensors, "BF16"))
    return load_trunk(folder, ops=recorder.ops)


@given(cuts=st.lists(st.integers(1, TOKENS - 1), max_size=5, unique=True))
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_positions_up_to_the_budget_are_dense_in_every_launch(
    trunk: Trunk, recorder: Recorder, cuts: list[int]
) -> None:
    recorder.dense.clear()
    recorder.sparse.clear()
    session = trunk.store(sessions=1, context_tokens=TOKENS).open()
    bounds = [0, *sorted(cuts), TOKENS]
    for a, b in itertools.pairwise(bounds):
        trunk.forward(session, [i % 256 for i in range(a, b)], "none")
    assert recorder.dense == list(range(LAST_DENSE + 1))
    assert len(recorder.sparse) == TOKENS - LAST_DENSE - 1


@pytest.mark.parametrize("first", [0, 60, 65, 66, 67, 90])
def test_one_launch_across_the_budget_is_cut_there(
    trunk: Trunk, recorder: Recorder, first: int
) -> None:
    """And each sparse query ends with the tail that only it sees."""
    session = trunk.store(sessions=1, context_tokens=TOKENS).open()
    if first:
        trunk.forward(session, list(range(first)), "none")
    recorder.dense.clear()
    recorder.sparse.clear()
    trunk.forward(session, list(range(70)), "none")
    assert recorder.dense == [p for p in range(first, first + 70) if p <= LAST_DENSE]
    sparse = [p for p in range(first, first + 70) if p > LAST_DENSE]
    ends = [p if p % RATIO == RATIO - 2 else -1 for p in sparse]  # a full tail's last token
    assert recorder.sparse == ends
