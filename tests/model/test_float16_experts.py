"""float16 rows through experts whose hidden values are too large for float16."""

from types import SimpleNamespace

import torch

from civetta.kernels.ops import ExpertWeights
from civetta.kernels.select import REFERENCE
from civetta.model.moe import moe
from civetta.model.weights import MoeWeights


def test_hidden_values_beyond_65504_stay_finite():
    random = torch.Generator().manual_seed(10)
    c = SimpleNamespace(experts_a_token=2)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    def large(*shape):
        return 50 * normal(*shape).abs()

    count, hidden, width = 8, 64, 32
    w = MoeWeights(
        router=normal(count, hidden),
        experts=ExpertWeights(
            gate=tuple(large(width, hidden) for _ in range(count)),
            up=tuple(large(width, hidden) for _ in range(count)),
            down=tuple(1e-3 * normal(hidden, width) for _ in range(count)),
        ),
        shared_gate=large(width, hidden),
        shared_up=large(width, hidden),
        shared_down=1e-3 * normal(hidden, width),
        shared_mix=normal(1, hidden),
    )
    h = normal(3, hidden).abs()
    assert float((h @ w.shared_gate.T).min()) ** 2 > 65504
    want, got = (moe(REFERENCE, c, w, x) for x in (h, h.half()))
    assert bool(torch.isfinite(got).all())
    assert float((got - want).norm() / want.norm()) < 2e-2
