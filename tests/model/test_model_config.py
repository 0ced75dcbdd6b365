from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny as writers
import tiny_gguf
from civetta.errors import ArchitectureUnsupported, CheckpointError, CheckpointMalformed
from civetta.model.config import ModelConfig, from_gguf, from_hf

TINY = writers.make()

# config.json of the release, as far as it is read (model.md A.2)
REAL_TEXT = {
    "model_type": "qwen4_exp_text", "hidden_size": 2560, "num_hidden_layers": 48,
    "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attention_bias": False, "bos_token_id": 248044, "eos_token_id": 248044, "pad_token_id": None,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 48, "linear_value_head_dim": 128, "output_gate_type": "sigmoid",
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320,
    "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ngram_size": 3,
    "heads_per_ngram": 8, "ngram_vocab_size_base": 20000000,
    "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128, "indexer_n_heads": 4,
    "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
    "indexer_compress_ratio": 4, "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "mrope_interleaved": True,
                        "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
REAL = {
    "model_type": "qwen4_exp",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "text_config": REAL_TEXT,
}
_ABSENT = object()


def changed_hf(**text) -> dict:
    config = copy.deepcopy(TINY.config)
    for key, value in text.items():
        if value is _ABSENT:
            config["text_config"].pop(key)
        else:
            config["text_config"][key] = value
    return config


def hf(**text) -> ModelConfig:
    return from_hf(changed_hf(**text), "here")


def metadata(**changes) -> dict:
    """GGUF keys as read from a file; a name's `__` stands for its dot."""
    keys = {f"qwen4exp.{k}": v for k, v in tiny_gguf.gguf_metadata(TINY).items()}
    keys["general.architecture"] = "qwen4exp"
    for name, value in changes.items():
        key = "qwen4exp." + name.replace("__", ".")
        if value is _ABSENT:
            del keys[key]
        else:
            keys[key] = value
    return keys


def gguf(*, has_indexer=True, **changes) -> ModelConfig:
    return from_gguf(metadata(**changes), "here", has_indexer=has_indexer, vocab=288)


def test_the_release():
    c = from_hf(REAL, "here")
    assert (c.layers, c.gdn_layers, c.qsa_layers) == (48, 36, 12)
    assert c.layer_kinds[:4] == ("gdn", "gdn", "gdn", "qsa")
    assert (c.gdn_channels, c.wide, c.rope_dims) == (10240, 10240, 64)
    assert (c.index_budget, c.index_ratio, c.vocab_size) == (2048, 4, 248320)
    assert (c.head_order, c.tied_head, c.image_token_id) == ("grouped", False, 248056)
    assert c.ple is not None
    assert (c.ple.layer, c.ple.row_values, c.ple.history_rows) == (1, 160, 9)  # ids count from 1
    assert c.ple.hash.rows == 320001536
    assert c.ple.hash.eos_token_id == 248044
    assert c.ple.hash.multipliers == (23703573157769, 20109073645365, 8052911324071)


def test_both_containers_give_one_model():
    ours, theirs = hf(), gguf()
    assert theirs.head_order == "tiled"
    assert ours.ple is not None
    assert theirs.ple is not None
    names = set(ModelConfig.__dataclass_fields__) - {"head_order", "ple"}
    assert {n: getattr(ours, n) for n in names} == {n: getattr(theirs, n) for n in names}
    assert theirs.ple.hash.multipliers == ours.ple.hash.multipliers
    assert theirs.ple.hash.offsets == ours.ple.hash.offsets
    assert (theirs.ple.layer, theirs.ple.embed) == (ours.ple.layer, ours.ple.embed)


def test_the_text_only_form_is_the_same_model():
    config, _ = writers.text_only(TINY)
    flat = from_hf(config | {"image_token_id": TINY.config["image_token_id"]}, "here")
    assert flat == hf()


def test_layer_types_may_be_missing():
    c = hf(layer_types=_ABSENT, num_hidden_layers=8)
    assert c.layer_kinds == ("gdn", "gdn", "gdn", "qsa") * 2
    assert gguf(attention__recurrent_layers=_ABSENT).layer_kinds == c.layer_kinds[:4]


def test_a_model_without_an_ngram_layer():
    assert hf(ple_layer_ids=[]).ple is None
    assert gguf(ple__layers=_ABSENT).ple is None


def test_defaults_of_the_library_for_absent_keys():
    assert hf().ple == hf(seed=1234).ple
    assert hf().ple != hf(seed=1).ple
    assert hf(norm_topk_prob=True) == hf()


def test_eos_may_be_a_list_whose_first_counts():
    c = hf(eos_token_id=[256, 258])
    assert c.ple is not None
    assert c.ple.hash.eos_token_id == 256


@pytest.mark.parametrize("order", ["list", "numpy"])
def test_gguf_arrays_may_be_lists_or_numpy(order):
    make = list if order == "list" else np.array
    flags, ratios = make([True, True, True, False]), make([0, 0, 0, 4])
    multipliers = make([int(x) for x in tiny_gguf.gguf_metadata(TINY)["ple.layer_multipliers"]])
    c = gguf(
        attention__recurrent_layers=flags,
        attention__compress_ratios=ratios,
        ple__layer_multipliers=multipliers,
    )
    assert c == gguf()
    assert c.ple is not None
    assert all(type(x) is int for x in c.ple.hash.multipliers)


@pytest.mark.parametrize("ratios", [_ABSENT, [0, 0, 0, 0], [], [0, 0, 0, 4]])
def test_ratio_zero_with_an_indexer_means_four(ratios):
    assert gguf(attention__compress_ratios=ratios).index_ratio == 4


def test_a_ratio_that_a_file_states_counts():
    assert gguf(attention__compress_ratios=[0, 0, 0, 8]).index_ratio == 8


def test_kv_heads_may_be_one_count_a_layer():
    assert gguf(attention__head_count_kv=[0, 0, 0, 2]).kv_heads == 2
    with pytest.raises(CheckpointMalformed, match="head_count_kv"):
        gguf(attention__head_count_kv=[0, 0, 1, 2])


def test_draft_blocks_are_not_layers_of_the_trunk():
    keys = {"block_count": 5, "nextn_predict_layers": 1}
    c = gguf(**keys, attention__recurrent_layers=[True, True, True, False, False])
    assert c.layers == 4


@pytest.mark.parametrize("kind", ["qwen3_next", None, 7, ["qwen4_exp"]])
def test_other_models_are_refused_by_name(kind):
    with pytest.raises(ArchitectureUnsupported, match=r"here: .*civetta runs"):
        from_hf(TINY.config | {"model_type": kind}, "here")
    with pytest.raises(ArchitectureUnsupported, match=r"here: .*civetta runs"):
        from_gguf(metadata() | {"general.architecture": kind}, "here", has_indexer=True, vocab=288)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output_gate_type", "silu"),
        ("output_gate_type", _ABSENT),  # the library's default is silu, not this model's
        ("hidden_act", "gelu"),
        ("norm_topk_prob", False),
        ("attention_bias", True),
        ("indexer_kv_heads", 2),
        ("linear_value_head_dim", 32),
        ("rope_parameters", _ABSENT),
        ("hidden_size", _ABSENT),
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("num_hidden_layers", 10**9),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("layer_types", ["linear_attention"]),
        ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"]),
        ("layer_types", ["linear_attention"] * 3 + [["full_attention"]]),
        ("layer_types", "linear_attention"),
        ("ple_layer_ids", [2, 3]),
        ("ple_layer_ids", "2"),
        ("ple_layer_ids", [2.5]),
        ("eos_token_id", None),
        ("eos_token_id", []),
        ("eos_token_id", -1),
        ("eos_token_id", True),
        ("ngram_size", 1),
        ("heads_per_ngram", 10**6),
    ],
)
def test_hf_values_that_cannot_be_run_are_refused_by_key(key, value):
    with pytest.raises(CheckpointMalformed, match=f"here: .*{key}"):
        hf(**{key: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 3}, "3 heads are no multiple of 2"),
        ({"linear_num_value_heads": 5}, "5 GDN value heads"),
        ({"num_experts_per_tok": 5}, "more experts a token"),
        ({"indexer_budget": 62}, "no multiple of its ratio"),
        ({"indexer_compress_ratio": 5, "indexer_budget": 65}, "does not divide a page"),
        ({"ple_layer_ids": [5]}, "n-gram layer 4 is not in the model"),
        ({"ple_layer_ids": [0]}, "n-gram layer -1 is not in the model"),
        ({"ple_embed_dim": 126}, "no multiple of its heads"),
        ({"indexer_head_dim": 8}, "more rotary dimensions"),
        ({"head_dim": 64}, "mrope section"),
    ],
)
def test_hf_sizes_that_contradict_each_other(changes, words):
    with pytest.raises(CheckpointMalformed, match=words):
        hf(**changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_length", _ABSENT),
        ("attention__value_length", 64),
        ("ssm__inner_size", 95),
        ("rope__dimension_sections", _ABSENT),
        ("rope__dimension_sections", [3, 3]),
        ("attention__recurrent_layers", [True]),
        ("attention__recurrent_layers", 1),
        ("ple__layers", [1, 2]),
        ("ple__layer_multipliers", _ABSENT),
        ("ple__layer_multipliers", [1, 2]),
        ("ple__layer_multipliers", [1, 2, -3]),
        ("ple__head_vocab_sizes", [61, 67, 71, 0]),
        ("ple__head_vocab_sizes", [61]),
        ("ple__head_offsets", [0, 61, 128]),
        ("ple__head_offsets", [0, 61, 128, -1]),
        ("ple__eos_token_id", _ABSENT),
        ("expert_count", "4"),
        ("block_count", 0),
    ],
)
def test_gguf_values_that_cannot_be_run_are_refused_by_key(key, value):
    name = "mrope section" if key == "rope__dimension_sections" else key.replace("__", r"\.")
    with pytest.raises(CheckpointMalformed, match=f"here: .*{name}"):
        gguf(**{key: value})


def test_ratios_that_differ_between_layers():
    keys = {"block_count": 8, "attention__recurrent_layers": [True, True, True, False] * 2}
    with pytest.raises(CheckpointMalformed, match="compress_ratios"):
        gguf(**keys, attention__compress_ratios=[0, 0, 0, 4, 0, 0, 0, 8])


def refusal(make) -> str:
    """The message of a refusal; what every message has when there is none."""
    try:
        make()
    except CheckpointError as error:
        return str(error)
    return "here: "


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 2**40), st.floats(), st.text(max_size=5),
    st.lists(st.one_of(st.integers(-5, 300), st.text(max_size=3), st.lists(st.none())), max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(TINY.text)), value=JUNK)
def test_any_value_gives_a_config_or_a_clear_refusal_hf(key, value):
    if key == "ngram_vocab_size_base" and isinstance(value, int):
        value = min(value, 2**20)  # larger ones are right too, and search for primes longer
    assert "here: " in refusal(lambda: hf(**{key: value}))


@settings(max_examples=100, deadline=None)
@given(key=st.sampled_from(sorted(TINY.text["rope_parameters"])), value=JUNK)
def test_any_rope_value_gives_a_config_or_a_clear_refusal(key, value):
    assert "here: " in refusal(
        lambda: hf(rope_parameters=TINY.text["rope_parameters"] | {key: value})
    )


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(tiny_gguf.gguf_metadata(TINY))), value=JUNK)
def test_any_value_gives_a_config_or_a_clear_refusal_gguf(key, value):
    assert "here: " in refusal(lambda: gguf(**{key: value}))
