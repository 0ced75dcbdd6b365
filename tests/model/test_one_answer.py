"""The promise of one answer, bit for bit: chunking, batching, decode against prefill, rewinding."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import pytest
import torch
import transformers_oracle as oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from civetta.kernels import cpu
from civetta.kernels.select import REFERENCE, select
from civetta.model.build import load_trunk
from civetta.model.inputs import Piece

if TYPE_CHECKING:
    from pathlib import Path

    from civetta.model.trunk import Trunk

pytestmark = pytest.mark.filterwarnings("ignore")

BUDGET = 64
TOKENS = 260
VARIANTS = ["reference-f32", "reference-bf16", *(["native-f32", "native-bf16"] * cpu.available())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = oracle.random_model(oracle.text_config(indexer_budget=BUDGET), seed=11)
    return oracle.save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trunks(folder: Path) -> dict[str, Trunk]:
    def load(name: str) -> Trunk:
        ops = REFERENCE if name.startswith("reference") else select("cpu", 2)
        dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
        return load_trunk(folder, dtype=dtype, ops=ops)

    return {name: load(name) for name in VARIANTS}


@functools.cache
def token_ids() -> list[int]:
    ids = torch.randint(0, 320, (TOKENS,), generator=torch.Generator().manual_seed(1))
    ids[[33, 66, 67]] = oracle.EOS
    return [int(i) for i in ids]


def run(trunk: Trunk, cuts: list[int], tokens: int = TOKENS) -> torch.Tensor:
    """Logits of all rows when launches end at `cuts`."""
    session = trunk.store(sessions=1, context_tokens=tokens).open()
    bounds = [0, *cuts, tokens]
    rows = [
        trunk.forward(session, token_ids()[a:b], "all")
        for a, b in itertools.pairwise(bounds)
        if a < b
    ]
    session.check()
    return torch.cat(rows)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 3, 63, 64, 65, 128])
def test_chunk_size_does_not_matter(trunks: dict[str, Trunk], name: str, chunk: int) -> None:
    whole = run(trunks[name], [])
    assert torch.isfinite(whole).all()
    assert torch.equal(run(trunks[name], list(range(chunk, TOKENS, chunk))), whole)


@pytest.mark.parametrize("name", VARIANTS)
@given(cuts=st.lists(st.integers(1, TOKENS - 1), max_size=6))
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_cuts_do_not_matter(trunks: dict[str, Trunk], name: str, cuts: list[int]) -> None:
    assert torch.equal(run(trunks[name], sorted(cuts)), run(trunks[name], []))


@pytest.mark.parametrize("name", VARIANTS)
def test_batch_does_not_matter(trunks: dict[str, Trunk], name: str) -> None:
    """Three sequences of different lengths, prefilled and decoded in shared launches."""
    trunk = trunks[name]
    starts, steps = (7, 70, 130), 5
    alone = []
    for start in starts:
        session = trunk.store(sessions=1, context_tokens=TOKENS).open()
        rows = [trunk.forward(session, token_ids()[:start])]
        rows += [trunk.forward(session, [token_ids()[start + i]]) for i in range(steps)]
        alone.append(torch.cat(rows))
    for order in ((0, 1, 2), (2, 0, 1)):
        store = trunk.store(sessions=3, context_tokens=TOKENS)
        sessions = [store.open() for _ in starts]

        def launch(step: int, order: tuple[int, ...] = order, s: list = sessions) -> torch.Tensor:  # type: ignore[type-arg]
            ids = token_ids()
            pieces = [
                Piece(
                    session=s[i],
                    ids=ids[: starts[i]] if step < 0 else [ids[starts[i] + step]],
                )
                for i in order
            ]
            return trunk.forward_pieces(pieces)

        together = torch.stack([launch(step) for step in range(-1, steps)])
        for place, i in enumerate(order):
            assert torch.equal(together[:, place], alone[i])
        for session in sessions:
            session.close()
        store.pool.check()
        assert store.pool.free_pages == store.pool.pages


@pytest.mark.parametrize("at", [5, 63, 64, 66, 67, 71, 128, 132, 200])
@pytest.mark.parametrize("back", [1, 4, 8])
def test_rewound_tokens_leave_no_trace(trunks: dict[str, Trunk], at: int, back: int) -> None:
    trunk = trunks["reference-f32"]
    wanted = run(trunk, [at])[at:]
    session = trunk.store(sessions=1, context_tokens=TOKENS).open()
    trunk.forward(session, token_ids()[:at], "none")
    wrong = [(i * 37 + 5) % 320 for i in range(back)]
    trunk.forward(session, wrong, "none")
    session.rewind(back)
    session.check()
    assert torch.equal(trunk.forward(session, token_ids()[at:], "all"), wanted)


def test_only_wanted_rows_are_returned(trunks: dict[str, Trunk]) -> None:
    trunk = trunks["reference-f32"]
    whole = run(trunk, [])
    session = trunk.store(sessions=1, context_tokens=TOKENS).open()
    assert trunk.forward(session, token_ids()[:100], "none").shape == (0, 320)
    assert torch.equal(trunk.forward(session, token_ids()[100:], "last"), whole[-1:])
