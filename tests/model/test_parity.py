"""The trunk against transformers in float32, prefill and cached decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers_oracle as oracle

from civetta.model.build import load_trunk

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "real ratios, small budget": (400, {}),
    "no n-gram layer": (300, {"ple_layer_ids": []}),
    "many heads, one kv head, wide experts": (
        300,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 9,
            "num_experts": 16,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 24,
            "indexer_budget": 32,
        },
    ),
    "eight layers, two streams": (
        200,
        {"num_hidden_layers": 8, "hc_count": 2, "hc_lowrank": 12, "indexer_budget": 128},
    ),
    "n-gram layer after attention": (
        200,
        {
            "ple_layer_ids": [3],
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "heads_per_ngram": 2,
        },
    ),
    "real budget of 2048": (
        3000,
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
            "indexer_budget": 2048,
            "num_experts": 4,
        },
    ),
}


@pytest.fixture(autouse=True)
def _ties_to_the_lower_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "topk", oracle.stable_topk)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    tokens, changes = CONFIGS[name]
    model = oracle.random_model(oracle.text_config(**changes), seed=len(name))
    ids = torch.randint(0, 320, (tokens,))
    ids[[50, 51, 120]] = oracle.EOS
    with torch.no_grad():
        wanted = model(ids[None], use_cache=False).logits[0]
    trunk = load_trunk(oracle.save(model, tmp_path))
    session = trunk.store(sessions=1, context_tokens=tokens).open()
    found = trunk.forward(session, ids.tolist(), "all")
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() <= 2e-4, f"position {int(error.argmax())}"
    best = wanted.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert (found.argmax(-1) == wanted.argmax(-1))[clear].all()


def test_cached_decode_equals_transformers(tmp_path: Path) -> None:
    model = oracle.random_model(oracle.text_config(), seed=3)
    ids = torch.randint(0, 320, (140,))
    ids[[70, 90]] = oracle.EOS
    wanted = []
    with torch.no_grad():
        out = model(ids[None, :60], use_cache=True)
        cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
        wanted.append(out.logits[0, -1])
        for t in range(60, 140):
            out = model(ids[None, t : t + 1], cache=cache, use_cache=True)
            wanted.append(out.logits[0, -1])
    trunk = load_trunk(oracle.save(model, tmp_path))
    session = trunk.store(sessions=1, context_tokens=140).open()
    found = [trunk.forward(session, ids[:60].tolist())]
    found += [trunk.forward(session, [int(t)]) for t in ids[60:]]
    error = (torch.cat(found) - torch.stack(wanted)).norm(dim=-1) / torch.stack(wanted).norm(dim=-1)
    assert error.max() <= 2e-4, f"step {int(error.argmax())}"


def test_bf16_follows_float32(tmp_path: Path) -> None:
    """Rounding of activations moves logits by its own size, no more."""
    model = oracle.random_model(oracle.text_config(), seed=5)
    path = oracle.save(model, tmp_path)
    ids = torch.randint(0, 320, (60,)).tolist()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        trunk = load_trunk(path, dtype=dtype)
        rows.append(trunk.forward(trunk.store(sessions=1, context_tokens=60).open(), ids, "all"))
    error = (rows[1] - rows[0]).norm(dim=-1) / rows[0].norm(dim=-1)
    assert 1e-5 < error.median() < 0.05
