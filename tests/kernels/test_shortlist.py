"""The best tokens of rows of logits and their sums: the kernel against plain torch."""

import pytest
import torch
from triton_inputs import DEVICE, Random

pytest.importorskip("triton")

from civetta.kernels.shortlist import reference, triton

F64 = torch.float64


def drawn(rows, *, noisy=0, seed=0, position=0):
    return torch.tensor([[noisy, seed, position + t] for t in range(rows)])


def compared(logits_TV, keep, temperature=0.7, **draw):
    """Both forms: sums within float64's rounding, everything else equal."""
    rows, vocab = logits_TV.shape
    hot_T = torch.linspace(temperature, 2 * temperature, rows, dtype=F64)
    room = torch.full((rows, vocab + 5), float("nan"))  # strided rows beside poison
    room[:, :vocab] = logits_TV
    on, asked = room.to(DEVICE)[:, :vocab], drawn(rows, **draw)
    want = reference.shortlists(room[:, :vocab], hot_T, asked, keep)
    got = triton.shortlists(on, hot_T.to(DEVICE), asked.to(DEVICE), keep).cpu()
    assert torch.equal(words(got), words(want))
    assert torch.equal(got[:, 2], want[:, 2])
    torch.testing.assert_close(got[:, :2], want[:, :2], rtol=1e-12, atol=0)
    if vocab >= keep:
        torch.testing.assert_close(got[:, 3], want[:, 3], rtol=1e-6, atol=0)
    return got


def words(found):
    return found[:, reference.SUMS :].contiguous().view(torch.int32)


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1])
def test_the_best_by_noisy_score(seed):
    """Seeds of 64 bits, positions beyond 32, odd and even tokens, every temperature."""
    compared(Random(5).normal(2, 9001) * 4, 64, noisy=1, seed=seed, position=2**33 + 5)
    compared(Random(6).normal(2, 300) * 30, 24, 0.05, noisy=1, seed=seed)


@pytest.mark.parametrize("vocab", [1, 127, 129, 8192, 8193, 17_001])
@pytest.mark.parametrize("keep", [1, 128])
def test_any_width(vocab, keep):
    compared(Random(vocab).normal(2, vocab) * 4, keep)


@pytest.mark.parametrize("values", [[0.0], [0.0, -0.0], [-1.5, -0.0, 0.0, 2.0], [-3e38, 3e38]])
def test_equal_logits_go_to_the_lower_id_and_zeros_are_equal(values):
    at = torch.arange(2 * 9000).view(2, 9000) * 7919 % len(values)
    got = compared(torch.tensor(values)[at], 64)
    if set(values) == {0.0}:  # both zeros
        assert torch.equal(words(got)[:, :64], torch.arange(64, dtype=torch.int32).expand(2, 64))


def test_rows_do_not_hang_on_rows_beside_them():
    logits = Random(3).normal(6, 9000)
    hot = torch.full((6,), 0.9, dtype=F64)
    asked = drawn(6, seed=3)
    asked[::2, 0] = 1
    together = triton.shortlists(logits.to(DEVICE), hot.to(DEVICE), asked.to(DEVICE), 40)
    for t in range(6):
        own = asked[t : t + 1].to(DEVICE)
        alone = triton.shortlists(logits[t : t + 1].to(DEVICE), hot[:1].to(DEVICE), own, 40)
        assert torch.equal(alone, together[t : t + 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 8191, 8999])
def test_what_is_not_finite_is_counted(bad, place):
    logits = Random(4).normal(2, 9000)
    logits[1, place] = bad
    hot = torch.ones(2, dtype=F64, device=DEVICE)
    for noisy in (0, 1):
        asked = drawn(2, noisy=noisy)
        found = triton.shortlists(logits.to(DEVICE), hot, asked.to(DEVICE), 16)
        assert found[:, 2].tolist() == [0, 1]
        assert reference.shortlists(logits, hot.cpu(), asked, 16)[:, 2].tolist() == [0, 1]
