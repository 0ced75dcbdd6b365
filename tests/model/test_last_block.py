"""Behind the last mixer only the rows that were asked for are computed: same bits, less work."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import tiny
from civetta.kernels import cpu
from civetta.kernels.select import REFERENCE, select
from civetta.model.build import load_trunk
from civetta.model.inputs import Piece, Span, Wanted

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from civetta.model.trunk import Trunk

KINDS = {
    "qsa": ["linear_attention", "linear_attention", "full_attention"],
    "gdn": ["linear_attention", "full_attention", "linear_attention"],
}
TOKENS = (150, 9, 70)
IDS = [int(i) for i in torch.randint(0, 288, (400,), generator=torch.Generator().manual_seed(3))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def write(name: str) -> Path:
        made = tiny.make(seed=5, layer_types=KINDS[name], num_hidden_layers=3)
        folder = tmp_path_factory.mktemp(name) / "hf"
        return tiny.write_hf(folder, made.config, tiny.stored(made.tensors, "BF16"))

    return {name: write(name) for name in KINDS}


@pytest.fixture(scope="module", params=list(itertools.product(KINDS, ["reference", "native"])))
def trunk(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Trunk:
    kind, table = request.param
    if table == "native" and not cpu.available():
        table = "reference"
    ops = REFERENCE if table == "reference" else select("cpu", 2)
    dtype = torch.bfloat16 if kind == "gdn" else torch.float32
    return load_trunk(folders[kind], ops=ops, dtype=dtype)


def run(trunk: Trunk, wanted: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Two launches of three sequences, then a token each: logits by piece, and of that token."""
    store = trunk.store(sessions=3, context_tokens=300)
    sessions = [store.open() for _ in TOKENS]
    found: list[Tensor] = []
    for part in (slice(0, None, 2), slice(1, None, 2)):  # any two halves of a prompt
        pieces = [
            Piece(session=s, ids=IDS[i : i + n][part], rows=rows)  # type: ignore[arg-type]  # literals
            for i, (s, n, rows) in enumerate(zip(sessions, TOKENS, wanted, strict=True))
        ]
        counts = [{"none": 0, "last": 1, "all": len(p.ids)}[p.rows] for p in pieces]
        found += trunk.forward_pieces(pieces).split(counts)
    after = [trunk.forward(s, [IDS[0]], "all") for s in sessions]
    return found, after


@pytest.mark.parametrize("wanted", list(itertools.product(["none", "last", "all"], repeat=3))[::2])
def test_wanted_rows_have_the_bits_of_all_rows(trunk: Trunk, wanted: tuple[str, ...]) -> None:
    whole, next_whole = run(trunk, ("all",) * 3)
    found, next_found = run(trunk, wanted)
    for rows, all_rows, name in zip(found, whole, wanted * 2, strict=True):
        expected = {"none": all_rows[:0], "last": all_rows[-1:], "all": all_rows}[name]
        assert torch.equal(rows, expected)
    assert all(torch.equal(a, b) for a, b in zip(next_found, next_whole, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_nobody_wants_meet_no_experts(folders: dict[str, Path], kind: str) -> None:
    """The last block's experts see the wanted rows alone, all other blocks see every row."""
    seen: list[int] = []

    def experts(h_TD: Tensor, ids_TM: Tensor, weights_TM: Tensor, w: object) -> Tensor:
        seen.append(len(h_TD))
        return REFERENCE.experts(h_TD, ids_TM, weights_TM, w)  # type: ignore[arg-type]  # as given

    trunk = load_trunk(folders[kind], ops=replace(REFERENCE, experts=experts))
    session = trunk.store(sessions=1, context_tokens=200).open()
    for rows, last in (("none", []), ("last", [1]), ("all", [40])):
        seen.clear()
        trunk.forward(session, IDS[:40], rows)  # type: ignore[arg-type]  # a literal
        assert seen == [40, 40, *last]


def test_spans_of_wanted_rows() -> None:
    known = torch.zeros(3, 0)
    spans = [
        Span(session=None, start=a, stop=b, first=f, known_3N=known)  # type: ignore[arg-type]  # not read
        for a, b, f in ((0, 4, 10), (4, 5, 0), (5, 8, 7))
    ]
    pieces = [
        Piece(session=None, ids=[], rows=rows)  # type: ignore[arg-type]  # not read
        for rows in ("last", "none", "all")
    ]
    found = Wanted.of(pieces, spans)
    assert found.rows_N.tolist() == [3, 5, 6, 7]
    assert [(s.start, s.stop, s.first) for s in found.spans] == [(0, 1, 13), (1, 4, 7)]
    assert Wanted.of(pieces[1:2], spans[1:2]).rows_N.tolist() == []
