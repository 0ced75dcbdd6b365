"""Every Triton kernel against the plain torch reference, on odd shapes, one row and many."""

import pytest
import torch
from triton_inputs import DEVICE, PACKED, Random, relative_error

pytest.importorskip("triton")

from civetta.kernels.gdn import reference as gdn_reference
from civetta.kernels.gdn import triton as gdn
from civetta.kernels.matmul import reference as matmul_reference
from civetta.kernels.matmul import triton as matmul
from civetta.kernels.moe import reference as moe_reference
from civetta.kernels.moe import triton as moe
from civetta.kernels.ops import ExpertWeights, HyperWeights
from civetta.kernels.packed import PackedExperts, PackedHyper, pack, pack_stack
from civetta.kernels.ple import reference as ple_reference
from civetta.kernels.ple import triton as ple
from civetta.kernels.qsa import reference as qsa_reference
from civetta.kernels.qsa import triton as qsa
from civetta.kernels.residual import reference as residual_reference
from civetta.kernels.residual import triton as residual

F32 = torch.float32
# the interpreter's products take bfloat16 for integers
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BOUND = 4e-6


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """Whatever a kernel leaves unwritten is NaN, or a number no index can be."""
    real, real_like = torch.empty, torch.empty_like

    def fill(x):
        return x.fill_(float("nan") if x.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(real(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(real_like(*a, **k)))


def on(x):
    return x.to(DEVICE)


def same(got, want):
    """Equal bits on a GPU; the interpreter's products are a library's, which choose by shape."""
    if DEVICE == "cuda":
        return torch.equal(got, want)
    return torch.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [F32, HALF])
def test_product_of_every_format(name, dtype):
    random = Random(1)
    cols = 256 if name.endswith(("_K", "XS")) else 1120 if name == "Q8_0" else 96
    w = random.stored(name, 70, cols)
    x = random.normal(3, cols, dtype=dtype)
    got = matmul.matmul(on(x), pack(w, dtype, DEVICE), F32)
    assert relative_error(got, matmul_reference.matmul(x, w, F32)) < BOUND


def test_planes_are_not_larger_than_the_blocks():
    for name in PACKED:
        w = Random(2).stored(name, 64, 256)
        stored = w.nbytes + sum(s.numel() * s.element_size() for s in (w.scale,) if s is not None)
        assert pack(w, F32, DEVICE).nbytes <= stored * 1.07, name


@pytest.mark.parametrize("dtype", [F32, HALF])
def test_formats_without_planes_keep_their_numbers(dtype):
    w = Random(3).stored("Q2_K", 20, 256)
    w.data_RB.view(20, -1, 84)[:, :, 80:84] = 0
    w.data_RB.view(20, -1, 84)[:, :, 81] = 60
    x = Random(4).normal(2, 256, dtype=dtype)
    got = matmul.matmul(on(x), pack(w, dtype, DEVICE), F32)
    assert relative_error(got, matmul_reference.matmul(x, w, F32)) < BOUND


@pytest.mark.parametrize("w_dtype", [F32, HALF])
def test_a_row_of_a_product_is_alone_what_it_is_in_a_batch(w_dtype):
    random = Random(5)
    x, w = random.normal(83, 1100), random.normal(40, 1100, dtype=w_dtype)
    packed = pack(w, F32, DEVICE)
    many = matmul.matmul(on(x), packed, F32)
    for rows in (slice(0, 1), slice(82, 83), slice(5, 22), slice(3, 60)):
        assert same(matmul.matmul(on(x[rows]), packed, F32), many[rows])


@pytest.mark.parametrize("streams", [1, 3, 4])
def test_norm_rope_hyper_connections(streams):
    random = Random(6)
    x, gain = random.normal(5, streams, 24), random.normal(streams, 24)
    assert (
        relative_error(
            residual.rms_norm(on(x), on(gain), 1e-6), residual_reference.rms_norm(x, gain, 1e-6)
        )
        < 1e-6
    )
    w = HyperWeights(
        gain_SD=gain,
        down=random.normal(10, streams * 24),
        up=random.normal(streams * 24, 10),
        inject=random.normal(streams, streams * 24),
    )
    packed = PackedHyper(
        gain_SD=on(gain),
        down=pack(w.down, F32, DEVICE),
        up=pack(w.up, F32, DEVICE),
        inject=on(w.inject),
    )
    want, want_inject = residual_reference.hyper_read(x, w, 1e-6, F32)
    got, got_inject = residual.hyper_read(on(x), packed, 1e-6, F32)
    assert relative_error(got, want) < 2e-6
    assert relative_error(got_inject, want_inject) < 2e-6
    y = random.normal(5, 24)
    assert (
        relative_error(
            residual.hyper_write(on(x), on(y), on(want_inject)),
            residual_reference.hyper_write(x, y, want_inject),
        )
        < 1e-6
    )


def test_rope_and_swiglu():
    random = Random(7)
    x, cos, sin = random.normal(5, 3, 24), random.normal(5, 8), random.normal(5, 8)
    assert (
        relative_error(residual.rope(on(x), on(cos), on(sin)), residual_reference.rope(x, cos, sin))
        < 1e-6
    )
    gate, up = random.normal(3, 1000), random.normal(3, 1000)
    assert (
        relative_error(residual.swiglu(on(gate), on(up)), residual_reference.swiglu(gate, up))
        < 1e-6
    )


def test_router_takes_the_lower_expert_among_equals():
    random = Random(8)
    logits = random.normal(6, 13)
    logits[0] = 0.0
    logits[1, 3] = logits[1, 9] = 5.0
    want_ids, want = moe_reference.route(logits, 4)
    ids, weights = moe.route(on(logits), 4)
    assert torch.equal(ids.cpu(), want_ids)
    assert relative_error(weights, want) < 1e-6


@pytest.mark.parametrize("rows", [1, 7, 41])
@pytest.mark.parametrize("fmt", ["F32", "Q8_0", "Q4_K"])
def test_experts(rows, fmt):
    random = Random(9)
    hidden, width = 256 if fmt == "Q4_K" else 64, 96

    def matrices(n, k, fmt):
        if fmt == "F32":
            return tuple(random.normal(n, k) for _ in range(9))
        return tuple(random.stored(fmt, n, k) for _ in range(9))

    w = ExpertWeights(
        gate=matrices(width, hidden, fmt),
        up=matrices(width, hidden, fmt),
        down=matrices(hidden, width, "Q5_1" if fmt == "Q4_K" else fmt),
    )
    packed = PackedExperts(
        gate=pack_stack(w.gate, F32, DEVICE),
        up=pack_stack(w.up, F32, DEVICE),
        down=pack_stack(w.down, F32, DEVICE),
    )
    h = random.normal(rows, hidden)
    ids, weights = moe_reference.route(random.normal(rows, 9), 3)
    want = moe_reference.experts(h, ids, weights, w)
    got = moe.experts(on(h), on(ids), on(weights), packed)
    assert relative_error(got, want) < 3e-6
    alone = moe.experts(on(h[-1:]), on(ids[-1:]), on(weights[-1:]), packed)
    assert same(alone, got[-1:])


def test_convolution_and_gates():
    random = Random(10)
    u, history, w = random.normal(7, 40), random.normal(9, 40), random.normal(40, 4)
    assert (
        relative_error(
            gdn.short_conv(on(u), on(history), on(w), 3), gdn_reference.short_conv(u, history, w, 3)
        )
        < 1e-6
    )
    a, b = random.normal(7, 6) * 9, random.normal(7, 6)
    scale, bias = -random.uniform(6), random.normal(6)
    for got, want in zip(
        gdn.gdn_gates(on(a), on(b), on(scale), on(bias)),
        gdn_reference.gdn_gates(a, b, scale, bias),
        strict=True,
    ):
        assert relative_error(got, want) < 1e-6


def gdn_inputs(random, rows):
    return (
        random.normal(rows, 2, 32),
        random.normal(rows, 2, 32),
        random.normal(rows, 6, 32),
        -random.uniform(rows, 6),
        random.uniform(rows, 6),
        random.normal(6, 32, 32),
    )


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(("rows", "first_new", "fold"), [(70, 3, 64), (5, 2, 0), (128, 0, 128)])
def test_delta_rule_chunks(rows, first_new, fold, tiled):
    inputs = gdn_inputs(Random(11), rows)
    want, want_state = gdn_reference.gdn_chunks(*inputs, tiled, first_new, fold)
    got, state = gdn.gdn_chunks(*map(on, inputs), tiled, first_new, fold)
    assert relative_error(got, want) < 1e-5
    assert relative_error(state, want_state) < 1e-5


def test_delta_rule_with_equal_keys_stays_exact():
    q, k, v, log_decay, beta, state = gdn_inputs(Random(12), 64)
    k[:] = k[:1]
    beta[:] = 0.99
    log_decay[:] = -1e-4
    inputs = (q, k, v, log_decay, beta, state)
    want, _ = gdn_reference.gdn_chunks(*inputs, True, 0, 64)
    got, _ = gdn.gdn_chunks(*map(on, inputs), True, 0, 64)
    assert relative_error(got, want) < 1e-5


def test_a_row_of_the_delta_rule_ignores_later_rows():
    inputs = gdn_inputs(Random(13), 64)
    many, _ = gdn.gdn_chunks(*map(on, inputs), True, 0, 64)
    for rows in (1, 40):
        part = (*(x[:rows] for x in inputs[:5]), inputs[5])
        few, _ = gdn.gdn_chunks(*map(on, part), True, 0, 0)
        assert same(few, many[:rows])


def test_gated_norm():
    random = Random(14)
    o, z, gain = random.normal(5, 6, 32), random.normal(5, 6, 32), random.normal(32)
    assert (
        relative_error(
            gdn.gdn_norm(on(o), on(z), on(gain), 1e-6), gdn_reference.gdn_norm(o, z, gain, 1e-6)
        )
        < 1e-6
    )


def test_index_keys_and_choice_of_blocks():
    random = Random(15)
    raw, gain = random.normal(9, 4, 32), random.normal(32)
    cos, sin = random.normal(9, 8), random.normal(9, 8)
    assert (
        relative_error(
            qsa.index_pool(on(raw), on(gain), 1e-6, on(cos), on(sin)),
            qsa_reference.index_pool(raw, gain, 1e-6, cos, sin),
        )
        < 1e-6
    )
    table, keys, q = random.permutation(12), random.normal(12, 16, 32), random.normal(5, 2, 32)
    q[0] = 0.0  # every block scores 0: the lowest ones are taken
    blocks = torch.tensor([20, 33, 100, 150, 192])
    want = qsa_reference.index_select(q, keys, table, blocks, 17)
    got = qsa.index_select(on(q), on(keys), on(table), on(blocks), 17)
    assert torch.equal(got.cpu(), want)
    assert want[0].tolist() == list(range(17))


def test_attention_over_all_keys_and_over_a_list():
    random = Random(16)
    table, k, v = random.permutation(12), random.normal(12, 64, 2, 32), random.normal(12, 64, 2, 32)
    q = random.normal(5, 6, 32)
    for first in (0, 600):
        want = qsa_reference.attend_dense(q, k, v, table, first)
        got = qsa.attend_dense(on(q), on(k), on(v), on(table), first)
        assert relative_error(got, want) < 2e-6
        alone = qsa.attend_dense(on(q[-1:]), on(k), on(v), on(table), first + 4)
        assert same(alone, got[-1:])
    tokens = torch.stack([random.permutation(700)[:531].sort().values for _ in range(5)])
    tokens[:, -2:] = -1
    want = qsa_reference.attend_sparse(q, k, v, table, tokens)
    got = qsa.attend_sparse(on(q), on(k), on(v), on(table), on(tokens))
    assert relative_error(got, want) < 2e-6
    alone = qsa.attend_sparse(on(q[3:4]), on(k), on(v), on(table), on(tokens[3:4]))
    assert same(alone, got[3:4])


def test_ngram_gate():
    random = Random(17)
    x, key, value = random.normal(5, 3, 24), random.normal(5, 3, 24), random.normal(5, 24)
    gains = random.normal(3, 24), random.normal(3, 24)
    key[0] = 0.0
    want = ple_reference.ple_gate(x, key, value, *gains, 1e-6)
    got = ple.ple_gate(on(x), on(key), on(value), *map(on, gains), 1e-6)
    assert relative_error(got, want) < 1e-6
