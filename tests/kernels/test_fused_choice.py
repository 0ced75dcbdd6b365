"""Choice of blocks: the same set as a stable sort takes, whatever the scores and the cut."""

import pytest
import torch
from triton_inputs import DEVICE, Random

pytest.importorskip("triton")

from civetta.kernels.fused import choice
from civetta.kernels.fused.launch import ROW_FIELDS, SESSION_FIELDS, Batch
from civetta.kernels.matmul.triton import counters

RATIO, KEEP, MOST = 4, 8, 128
SEEN = (8, 9, 37, 64, 97, MOST)
"""Blocks that the rows see; the first reads all of its blocks, so nothing is chosen for it."""


def kept_of(scores: torch.Tensor, seen: tuple[int, ...] = SEEN, keep: int = KEEP) -> torch.Tensor:
    rows, most = scores.shape
    rows_FT = torch.zeros((len(ROW_FIELDS), rows), dtype=torch.int64)
    rows_FT[ROW_FIELDS.index("position")] = torch.tensor(seen) * RATIO
    batch = Batch(
        rows_FT=rows_FT.to(DEVICE),
        sessions_FB=torch.zeros((len(SESSION_FIELDS), 1), dtype=torch.int64, device=DEVICE),
        rows=rows,
        sessions=1,
        most_rows=rows,
        in_place=True,
        table_tokens=most * RATIO,
        counts=counters(torch.device(DEVICE)),
    )
    kept = torch.full((rows, keep), -1, dtype=torch.int32, device=DEVICE)
    choice._select(batch, scores.to(DEVICE), kept, 0, RATIO)
    assert not batch.counts.any(), "a launch leaves the counters zero"
    return kept.cpu()


def wanted(row: torch.Tensor, seen: int, keep: int) -> list[int]:
    order = torch.sort(row[:seen], descending=True, stable=True).indices[:keep]
    return sorted(order.tolist())


def scores_of(kind: str) -> torch.Tensor:
    scores = Random(11).uniform(len(SEEN), MOST)
    if kind == "few values":
        return torch.floor(scores * 4) / 4
    if kind == "all equal":
        return torch.full_like(scores, 0.7)
    if kind == "zeros but one":
        scores = torch.zeros_like(scores)
        scores[:, 61] = 1e-30
    elif kind == "huge":
        scores[:, ::3] = torch.finfo(torch.float32).max
    return scores


def assert_the_best_seen_are_kept(scores):
    poisoned = scores.clone()
    for i, n in enumerate(SEEN):
        poisoned[i, n:] = torch.finfo(torch.float32).max  # not seen, so not to be taken
    got = kept_of(poisoned)
    assert got[0].tolist() == [-1] * KEEP
    for i, n in enumerate(SEEN[1:], 1):
        assert got[i].tolist() == wanted(scores[i], n, KEEP)


@pytest.mark.parametrize("kind", ["apart", "few values", "all equal", "zeros but one", "huge"])
@pytest.mark.parametrize("segment", [16, 64, 128])
def test_the_best_blocks_ascending_and_equal_ones_from_below(kind, segment, monkeypatch):
    monkeypatch.setattr(choice, "SEGMENT", segment)
    assert_the_best_seen_are_kept(scores_of(kind))


@pytest.mark.parametrize("kind", ["apart", "few values", "all equal", "zeros but one", "huge"])
def test_a_row_of_many_goes_through_the_sieve(kind, monkeypatch):
    monkeypatch.setattr(choice, "FEW_ROWS", 1)
    monkeypatch.setattr(choice, "select_kernel", None)
    assert_the_best_seen_are_kept(scores_of(kind))


def test_what_is_too_long_for_segments_is_searched_in_passes(monkeypatch):
    monkeypatch.setattr(choice, "SEGMENT", 4)
    scores = scores_of("few values")
    got = kept_of(scores)
    for i, n in enumerate(SEEN[1:], 1):
        assert got[i].tolist() == wanted(scores[i], n, KEEP)


def test_a_long_row_of_many_equal_scores():
    scores = torch.zeros(1, 1 << 14)
    scores[0, 5::1000] = Random(12).uniform(17) + 0.5
    got = kept_of(scores, (1 << 14,), 512)
    assert got[0].tolist() == wanted(scores[0], 1 << 14, 512)
