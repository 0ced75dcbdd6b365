"""The compiled delta rule, attention and block choice against the reference; decode = prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from native_calls import (
    TOLERANCE,
    instruction_sets,
    numbers,
    poisoned,
    relative,
    same_bits_everywhere,
)

from civetta.kernels import cpu
from civetta.kernels.ops import GDN_CHUNK, PAGE_TOKENS
from civetta.kernels.select import REFERENCE, select

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the extension was not built")

DTYPES = [torch.float32, torch.bfloat16]
poison = pytest.fixture(autouse=True)(poisoned)


@pytest.fixture(params=instruction_sets())
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    from civetta.kernels import _native

    _native.use_instructions(request.param)
    yield request.param
    _native.use_instructions("")


@pytest.fixture(scope="module")
def ops():
    return select("cpu", 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("taps", "dilation", "channels"), [(4, 1, 50), (4, 3, 33), (3, 2, 1)])
def test_short_conv(
    instructions: str, ops, dtype: torch.dtype, taps: int, dilation: int, channels: int
) -> None:
    u, w = numbers(37, channels, dtype=dtype), numbers(channels, taps, seed=1)
    history = numbers((taps - 1) * dilation, channels, seed=2, dtype=dtype)
    found = ops.short_conv(u, history, w, dilation)
    assert relative(found, REFERENCE.short_conv(u, history, w, dilation)) < TOLERANCE[dtype]
    whole = torch.cat([history, u])
    for t in (0, 5, 36):
        alone = ops.short_conv(u[t : t + 1], whole[t : t + len(history)], w, dilation)
        assert torch.equal(alone, found[t : t + 1])


def test_too_many_taps_are_refused(ops) -> None:
    with pytest.raises(ValueError, match="at most 16 taps"):
        ops.short_conv(numbers(2, 3), numbers(16, 3), numbers(3, 17), 1)


@pytest.mark.parametrize("heads", [1, 6, 17])
def test_gates_and_norm(instructions: str, ops, heads: int) -> None:
    a, b = numbers(40, heads) * 30, numbers(40, heads, seed=1) * 30
    scale, bias = -numbers(heads, seed=2).exp(), numbers(heads, seed=3)
    for one, other in zip(
        ops.gdn_gates(a, b, scale, bias), REFERENCE.gdn_gates(a, b, scale, bias), strict=True
    ):
        assert torch.allclose(one, other, rtol=2e-6, atol=1e-30)
    for dtype in DTYPES:
        o = numbers(40, heads, 24, dtype=dtype)
        z = numbers(40, heads, 24, seed=4, dtype=dtype)
        gain = numbers(24, seed=5)
        found = ops.gdn_norm(o, z, gain, 1e-6)
        assert relative(found, REFERENCE.gdn_norm(o, z, gain, 1e-6)) < TOLERANCE[dtype]
        assert torch.equal(ops.gdn_norm(o[39:], z[39:], gain, 1e-6), found[39:])


def delta_case(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple:
    heads, values = 2, 6
    return (
        numbers(rows, heads, width, dtype=dtype),
        numbers(rows, heads, width, seed=1, dtype=dtype),
        numbers(rows, values, width, seed=2, dtype=dtype),
        -numbers(rows, values, seed=4).abs(),
        torch.sigmoid(numbers(rows, values, seed=5)),
        numbers(values, width, width, seed=3),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("width", [8, 16, 100])
def test_delta_rule(instructions: str, ops, width: int, tiled: bool, dtype: torch.dtype) -> None:
    for rows in (1, 63, 64, 130):
        case = delta_case(rows, width, dtype)
        fold = rows - rows % GDN_CHUNK
        found, folded = ops.gdn_chunks(*case, tiled, 0, fold)
        wanted, folded_wanted = REFERENCE.gdn_chunks(*case, tiled, 0, fold)
        assert relative(found, wanted) < 2 * TOLERANCE[dtype]
        assert relative(folded, folded_wanted) < 4e-6
        assert fold or folded is case[5]


@pytest.mark.parametrize("width", [8, 32])
def test_delta_rows_do_not_depend_on_the_launch(instructions: str, ops, width: int) -> None:
    """Any place of the first new row, any end, whole chunks open, queries of open rows unknown."""
    q, k, v, decay, beta, state = delta_case(150, width)
    whole, _ = ops.gdn_chunks(q, k, v, decay, beta, state, False, 0, 64)
    _, after = ops.gdn_chunks(q, k, v, decay, beta, state, False, 0, 128)
    for first, last in ((0, 1), (5, 6), (62, 65), (63, 64), (64, 66), (70, 72), (127, 150)):
        known = q.clone()
        known[:first] = float("nan")
        found, folded = ops.gdn_chunks(
            known[:last], k[:last], v[:last], decay[:last], beta[:last], state, False, first, 0
        )
        assert torch.equal(found, whole[first:last]), (first, last)
        assert folded is state
    later, _ = ops.gdn_chunks(
        q[128:], k[128:], v[128:], decay[128:], beta[128:], after, False, 0, 0
    )
    assert torch.equal(later, whole[128:])


def pages(x_NGA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over pages in a shuffled order; what no query sees is NaN."""
    count = -(-len(x_NGA) // PAGE_TOKENS)
    table = torch.randperm(count + 2, generator=torch.Generator().manual_seed(9))[:count]
    whole = torch.full((count + 2, PAGE_TOKENS, *x_NGA.shape[1:]), float("nan"), dtype=x_NGA.dtype)
    for i, page in enumerate(table.tolist()):
        rows = x_NGA[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
        whole[page, : len(rows)] = rows
    return whole, table


def without_nan(x: torch.Tensor) -> torch.Tensor:
    """The reference multiplies what it does not see by zero."""
    return x.nan_to_num(0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(6, 2, 16), (4, 4, 20), (12, 1, 80)])
def test_dense_attention(
    instructions: str, ops, dtype: torch.dtype, heads: int, groups: int, width: int
) -> None:
    total = 1040
    q, k = numbers(total, heads, width, dtype=dtype), numbers(total, groups, width, dtype=dtype)
    v = numbers(total, groups, width, seed=2, dtype=dtype)
    (k_pages, table), (v_pages, _) = pages(k), pages(v)
    clean = without_nan(k_pages), without_nan(v_pages)
    for first, last in ((0, 1), (0, 70), (510, 515), (1030, 1033)):
        part = q[first:last]
        found = ops.attend_dense(part, k_pages, v_pages, table, first)
        wanted = REFERENCE.attend_dense(part, *clean, table, first)
        assert relative(found, wanted) < TOLERANCE[dtype]
        for t in (0, last - first - 1):
            alone = ops.attend_dense(part[t : t + 1], k_pages, v_pages, table, first + t)
            assert torch.equal(alone, found[t : t + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 20])
def test_sparse_attention(instructions: str, ops, dtype: torch.dtype, width: int) -> None:
    q, k = numbers(9, 6, width, dtype=dtype), numbers(700, 2, width, seed=1, dtype=dtype)
    v = numbers(700, 2, width, seed=2, dtype=dtype)
    (k_pages, table), (v_pages, _) = pages(k), pages(v)
    tokens = torch.full((9, 603), -1, dtype=torch.int64)
    for t, count in enumerate((600, 513, 512, 511, 1, 9, 603, 64, 8)):
        order = torch.randperm(700, generator=torch.Generator().manual_seed(t))
        tokens[t, :count] = order[:count].sort().values
    found = ops.attend_sparse(q, k_pages, v_pages, table, tokens)
    clean = without_nan(k_pages), without_nan(v_pages)
    assert relative(found, REFERENCE.attend_sparse(q, *clean, table, tokens)) < TOLERANCE[dtype]
    for t in range(9):
        alone = ops.attend_sparse(q[t : t + 1], k_pages, v_pages, table, tokens[t : t + 1])
        assert torch.equal(alone, found[t : t + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("keys", "heads", "width"),
    [(1, 1, 4), (4, 3, 72), (15, 2, 20), (513, 2, 72), (1030, 1, 33), (300, 6, 32)],
)
def test_image_attention(
    instructions: str, ops, dtype: torch.dtype, keys: int, heads: int, width: int
) -> None:
    packed = numbers(3, keys, heads, width, dtype=dtype)
    q, k, v = 2 * packed[0], 2 * packed[1], packed[2]
    found = ops.attend_image(q, k, v)
    assert relative(found, REFERENCE.attend_image(q, k, v)) < TOLERANCE[dtype]
    for rows in (slice(0, 1), slice(keys // 2, keys // 2 + 5), slice(keys - 1, keys)):
        assert torch.equal(ops.attend_image(q[rows], k, v), found[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 16, 128])
def test_block_choice(instructions: str, ops, dtype: torch.dtype, width: int) -> None:
    blocks, a_page = 700, 16
    keys = numbers(blocks, width, seed=1, dtype=dtype)
    keys[10] = keys[40]
    keys[300:] = keys[0]  # equal scores, the lower block first
    key_pages = torch.full((44, a_page, width), float("nan"), dtype=dtype)
    key_pages.view(-1, width)[:blocks] = keys
    q, seen = numbers(21, 4, width, dtype=dtype), torch.randint(70, blocks + 1, (21,))
    arguments = (key_pages, torch.arange(44))
    found = ops.index_select(q, *arguments, seen, 64)
    clean = (without_nan(key_pages), torch.arange(44))
    for t in range(21):
        alone = ops.index_select(q[t : t + 1], *arguments, seen[t : t + 1], 64)
        assert torch.equal(alone, found[t : t + 1])
        mine, theirs = (set(x.tolist()) for x in (found[t], REFERENCE.index_select(
            q[t : t + 1], *clean, seen[t : t + 1], 64
        )[0]))  # fmt: skip
        scores = torch.relu(q[t].double() @ keys.double().t()).sum(0)
        # Where they differ, the scores are level within rounding.
        for one, other in zip(sorted(mine - theirs), sorted(theirs - mine), strict=True):
            assert abs(float(scores[one] - scores[other])) < 1e-5 * float(scores.max())
        assert found[t].tolist() == sorted(found[t].tolist())
        assert int(found[t].max()) < int(seen[t])


def test_equal_scores_go_to_the_lower_block(ops) -> None:
    found = ops.index_select(
        torch.zeros(2, 4, 8), torch.zeros(3, 16, 8), torch.arange(3), torch.tensor([20, 48]), 5
    )
    assert found.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_instruction_sets_and_threads_agree(ops) -> None:
    case = delta_case(130, 24)
    same_bits_everywhere(lambda: ops.gdn_chunks(*case, False, 0, 128)[0])
    same_bits_everywhere(lambda: ops.gdn_chunks(*case, False, 0, 128)[1])
    k, v = numbers(600, 2, 48), numbers(600, 2, 48, seed=1)
    (k_pages, table), (v_pages, _) = pages(k), pages(v)
    q = numbers(20, 6, 48, seed=2)
    same_bits_everywhere(lambda: ops.attend_dense(q, k_pages, v_pages, table, 580))
    tokens = torch.arange(540).repeat(20, 1)
    same_bits_everywhere(lambda: ops.attend_sparse(q, k_pages, v_pages, table, tokens))
    keys, seen = numbers(10, 16, 48, seed=3), torch.full((20,), 150)
    same_bits_everywhere(lambda: ops.attend_image(k[:70], k, v))
    same_bits_everywhere(lambda: ops.index_select(q, keys, torch.arange(10), seen, 40))
