"""Every reference op against an independent, slower statement of the same formula in float64."""

from __future__ import annotations

import pytest
import torch

from civetta.kernels.elementwise import sigmoid, silu, softplus
from civetta.kernels.gdn import reference as gdn
from civetta.kernels.matmul.reference import matmul
from civetta.kernels.moe.reference import experts, route
from civetta.kernels.ops import GDN_CHUNK, PAGE_TOKENS, ExpertWeights
from civetta.kernels.qsa import reference as qsa
from civetta.kernels.residual.reference import hyper_write, rms_norm, rope


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = (found.double() - wanted).norm() / wanted.norm()
    assert torch.isfinite(error)
    return float(error)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("function", [sigmoid, silu, softplus])
def test_elementwise_does_not_depend_on_place(function: object) -> None:
    assert callable(function)
    x = numbers(4001) * 4
    whole = function(x)
    pieces = torch.cat([function(x[i : i + 7]) for i in range(0, 4001, 7)])
    assert torch.equal(whole, pieces)
    exact = {
        sigmoid: torch.sigmoid,
        silu: torch.nn.functional.silu,
        softplus: torch.nn.functional.softplus,
    }
    assert relative(whole, exact[function](x.double())) < 1e-6  # type: ignore[index]


def test_elementwise_extremes_are_finite() -> None:
    x = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30])
    assert torch.isfinite(sigmoid(x)).all()
    assert silu(torch.tensor([-100.0, 100.0])).tolist() == pytest.approx([0.0, 100.0], abs=1e-30)
    assert softplus(torch.tensor([-100.0, 100.0])).tolist() == pytest.approx(
        [0.0, 100.0], abs=1e-30
    )


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 70])
@pytest.mark.parametrize(("cols", "outputs"), [(1, 1), (7, 3), (64, 1), (33, 130)])
def test_matmul(rows: int, cols: int, outputs: int) -> None:
    x, w = numbers(rows, cols), numbers(outputs, cols, seed=1)
    y = matmul(x, w, torch.float32)
    assert y.shape == (rows, outputs)
    assert relative(y, x.double() @ w.double().t()) < 1e-5
    alone = torch.cat([matmul(x[i : i + 1], w, torch.float32) for i in range(rows)])
    assert torch.equal(alone, y)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_gdn_chunks_equal_the_recurrence(rows: int, tiled: bool) -> None:
    heads, values, width = 2, 6, 8
    q, k = numbers(rows, heads, width), numbers(rows, heads, width, seed=1)
    v, state = numbers(rows, values, width, seed=2), numbers(values, width, width, seed=3)
    decay, beta = -numbers(rows, values, seed=4).abs(), torch.sigmoid(numbers(rows, values, seed=5))
    fold = rows - rows % GDN_CHUNK
    found, folded = gdn.gdn_chunks(q, k, v, decay, beta, state, tiled, 0, fold)
    wanted, _ = gdn.gdn_recurrent(q, k, v, decay, beta, state.double(), tiled)
    assert relative(found, wanted) < 1e-5
    parts = (x[:fold] for x in (q, k, v, decay, beta))
    if fold:
        _, after = gdn.gdn_recurrent(*parts, state.double(), tiled)
        assert relative(folded, after) < 1e-5
    else:
        assert torch.equal(folded, state)


def test_gdn_head_orders_differ_only_by_the_permutation() -> None:
    heads, ratio, width, rows = 2, 3, 8, 20
    q, k = numbers(rows, heads, width), numbers(rows, heads, width, seed=1)
    v = numbers(rows, heads * ratio, width, seed=2)
    decay = -numbers(rows, heads * ratio, seed=4).abs()
    beta = torch.sigmoid(numbers(rows, heads * ratio, seed=5))
    state = torch.zeros(heads * ratio, width, width)
    tile = torch.tensor([k_ * ratio + j for j in range(ratio) for k_ in range(heads)])
    grouped, _ = gdn.gdn_chunks(q, k, v, decay, beta, state, False, 0, 0)
    tiled, _ = gdn.gdn_chunks(q, k, v[:, tile], decay[:, tile], beta[:, tile], state, True, 0, 0)
    assert torch.equal(grouped[:, tile], tiled)


@pytest.mark.parametrize("dilation", [1, 3])
def test_short_conv(dilation: int) -> None:
    u, w = numbers(11, 5), numbers(5, 4, seed=1)
    history = numbers(3 * dilation, 5, seed=2)
    padded = torch.cat([history, u]).double()
    rows = [sum(w[:, k].double() * padded[t + k * dilation] for k in range(4)) for t in range(11)]
    wanted = torch.nn.functional.silu(torch.stack(rows))  # type: ignore[arg-type]
    assert relative(gdn.short_conv(u, history, w, dilation), wanted) < 1e-6


def pages(x_NGA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows spread over pages in a shuffled order, unused pages poisoned; pages and table."""
    count = -(-len(x_NGA) // PAGE_TOKENS)
    table = torch.randperm(count + 2, generator=torch.Generator().manual_seed(9))[:count]
    whole = torch.full((count + 2, PAGE_TOKENS, *x_NGA.shape[1:]), float("nan"))
    for i, page in enumerate(table.tolist()):
        rows = x_NGA[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
        whole[page] = 0
        whole[page, : len(rows)] = rows
    return whole, table


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query [Q, A] over keys [N, G, A], float64."""
    groups = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qa,nqa->qn", q.double(), k) / q.shape[-1] ** 0.5
    return torch.einsum("qn,nqa->qa", scores.softmax(-1), v)


@pytest.mark.parametrize(("first", "rows"), [(0, 1), (0, 70), (510, 5), (1030, 3)])
def test_dense_attention(first: int, rows: int) -> None:
    total = first + rows
    q, k = numbers(rows, 6, 16), numbers(total, 2, 16, seed=1)
    v = numbers(total, 2, 16, seed=2)
    (k_pages, table), (v_pages, _) = pages(k), pages(v)
    found = qsa.attend_dense(q, k_pages, v_pages, table, first)
    for t in range(rows):
        n = first + t + 1
        assert relative(found[t], attention(q[t], k[:n], v[:n])) < 1e-5


def test_sparse_attention() -> None:
    q, k, v = numbers(4, 6, 16), numbers(700, 2, 16, seed=1), numbers(700, 2, 16, seed=2)
    (k_pages, table), (v_pages, _) = pages(k), pages(v)
    tokens = torch.full((4, 600), -1, dtype=torch.int64)
    for t, count in enumerate((600, 513, 512, 1)):
        order = torch.randperm(700, generator=torch.Generator().manual_seed(t))
        tokens[t, :count] = order[:count].sort().values
    found = qsa.attend_sparse(q, k_pages, v_pages, table, tokens)
    for t in range(4):
        own = tokens[t][tokens[t] >= 0]
        assert relative(found[t], attention(q[t], k[own], v[own])) < 1e-5


def test_block_choice_is_exact_and_ties_go_to_the_lower_block() -> None:
    blocks, heads, width, ratio = 70, 4, 8, 4
    keys = numbers(blocks, width, seed=1)
    keys[10] = keys[40]
    q = numbers(9, heads, width)
    a_page = PAGE_TOKENS // ratio
    count = -(-blocks // a_page)
    key_pages = torch.zeros(count * a_page, width)
    key_pages[:blocks] = keys
    seen = torch.tensor([30, 41, 50, 60, 70, 69, 68, 45, 70])
    found = qsa.index_select(q, key_pages.view(count, a_page, width), torch.arange(count), seen, 16)
    for t in range(9):
        n = int(seen[t])
        scores = torch.relu(q[t].double() @ keys[:n].double().t()).sum(0)
        order = sorted(range(n), key=lambda b: (-float(scores[b]), b))
        assert sorted(order[:16]) == found[t].tolist()


def test_block_choice_among_equal_scores() -> None:
    key_pages = torch.zeros(3, 16, 8)
    found = qsa.index_select(
        torch.zeros(2, 4, 8), key_pages, torch.arange(3), torch.tensor([20, 48]), 5
    )
    assert found.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_router_prefers_the_lower_expert_when_equal() -> None:
    ids, weights = route(torch.zeros(3, 9), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.allclose(weights, torch.full((3, 4), 0.25))


def test_experts_equal_a_plain_loop() -> None:
    w = ExpertWeights(
        gate=tuple(numbers(10, 12, seed=i) for i in range(5)),
        up=tuple(numbers(10, 12, seed=10 + i) for i in range(5)),
        down=tuple(numbers(12, 10, seed=20 + i) for i in range(5)),
    )
    h = numbers(17, 12, seed=30)
    ids, weights = route(numbers(17, 5, seed=31), 3)
    wanted = torch.zeros(17, 12, dtype=torch.float64)
    for t in range(17):
        for slot in range(3):
            gate, up, down = (x[int(ids[t, slot])] for x in (w.gate, w.up, w.down))
            assert isinstance(gate, torch.Tensor)
            assert isinstance(up, torch.Tensor)
            assert isinstance(down, torch.Tensor)
            x = h[t].double()
            hidden = torch.nn.functional.silu(gate.double() @ x) * (up.double() @ x)
            wanted[t] += weights[t, slot].double() * (down.double() @ hidden)
    assert relative(experts(h, ids, weights, w), wanted) < 1e-5


def test_rope_turns_pairs_and_leaves_the_rest() -> None:
    x = numbers(3, 2, 10)
    angle = numbers(3, 3, seed=1)
    found = rope(x, angle.cos(), angle.sin())
    assert torch.equal(found[..., 6:], x[..., 6:])
    turned = torch.complex(x[..., :3], x[..., 3:6]) * torch.polar(torch.ones(3, 3), angle)[:, None]
    assert torch.allclose(found[..., :3], turned.real, atol=1e-6)
    assert torch.allclose(found[..., 3:6], turned.imag, atol=1e-6)


def test_grouped_norm_and_write() -> None:
    x, gain = numbers(5, 4, 8), numbers(4, 8, seed=1)
    wanted = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
    assert relative(rms_norm(x, gain, 1e-6), wanted) < 1e-6
    y, inject = numbers(5, 8, seed=2), numbers(5, 4, seed=3)
    assert torch.equal(hyper_write(x, y, inject), x + inject[..., None] * y[:, None])
