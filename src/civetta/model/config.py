"""`ModelConfig`: every size of the network, read from HF config.json or GGUF metadata.

Nothing is defaulted in silence: a key is required, or its default is the one the format states
(model.md A.2, C.1). Values the engine cannot compute with are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from civetta.errors import ArchitectureUnsupported, CheckpointMalformed
from civetta.model.config_keys import Keys, mapping
from civetta.ngram.hash import NgramHash, make_hash

if TYPE_CHECKING:
    from collections.abc import Mapping

LayerKind = Literal["gdn", "qsa"]
MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PleConfig:
    """The n-gram layer (model.md A.5): where it sits, its hash and its table."""

    layer: int  # 0-based
    embed: int
    conv_kernel: int
    conv_dilation: int
    hash: NgramHash

    @property
    def row_values(self) -> int:
        """Values of one table row."""
        return self.embed // self.hash.heads

    @property
    def history_rows(self) -> int:
        """Conv rows kept between launches."""
        return (self.conv_kernel - 1) * self.conv_dilation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the trunk; names as in model.md. `head_order` says how GDN value heads are laid out:
    "grouped" (value head v reads key head v // ratio, HF) or "tiled" (v mod key heads, GGUF)."""

    hidden: int
    vocab: int
    context_tokens: int
    layer_kinds: tuple[LayerKind, ...]
    rms_eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rope_dims: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    index_heads: int
    index_dim: int
    index_budget: int
    index_ratio: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_dim: int
    gdn_conv_kernel: int
    experts: int
    experts_a_token: int
    expert_width: int
    shared_width: int
    streams: int
    stream_rank: int
    ple: PleConfig | None
    head_order: Literal["grouped", "tiled"]
    tied_head: bool = False
    image_token_id: int | None = None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_kinds)

    @property
    def gdn_layers(self) -> int:
        """Number of gated delta-net layers."""
        return sum(kind == "gdn" for kind in self.layer_kinds)

    @property
    def qsa_layers(self) -> int:
        """Number of sparse attention layers."""
        return sum(kind == "qsa" for kind in self.layer_kinds)

    @property
    def gdn_channels(self) -> int:
        """Channels of the GDN convolution: q, k and v."""
        return (2 * self.gdn_key_heads + self.gdn_value_heads) * self.gdn_head_dim

    @property
    def wide(self) -> int:
        """Width of all streams together."""
        return self.streams * self.hidden

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.vocab


def from_hf(config: Mapping[str, object], where: str) -> ModelConfig:
    """Config of a Hugging Face folder: the full form or transformers' text-only form (A.2)."""
    text, outer = _hf_text(config, where)
    keys = Keys(text, where)
    keys.fixed("hidden_act", ("silu",))
    if keys.get("output_gate_type") != "sigmoid":  # absent means silu in transformers
        raise keys.wrong("output_gate_type", keys.get("output_gate_type"), "'sigmoid'")
    keys.fixed("norm_topk_prob", (True,))
    keys.fixed("attention_bias", (False,))
    keys.fixed("indexer_kv_heads", (1,))
    rope = Keys(mapping(text.get("rope_parameters"), "rope_parameters", where), where)
    rope.fixed("rope_type", ("default",))
    head_dim = keys.integer("head_dim")
    partial = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if keys.integer("linear_key_head_dim") != keys.integer("linear_value_head_dim"):
        raise keys.wrong(
            "linear_value_head_dim", text["linear_value_head_dim"], "the key head's size"
        )
    section = rope.integers("mrope_section") or (11, 11, 10)
    image = outer.get("image_token_id")
    return _checked(
        ModelConfig(
            hidden=keys.integer("hidden_size"),
            vocab=keys.integer("vocab_size"),
            context_tokens=keys.integer("max_position_embeddings"),
            layer_kinds=_hf_kinds(keys),
            rms_eps=keys.number("rms_norm_eps"),
            heads=keys.integer("num_attention_heads"),
            kv_heads=keys.integer("num_key_value_heads"),
            head_dim=head_dim,
            rope_dims=int(head_dim * partial),
            rope_theta=rope.number("rope_theta"),
            mrope_section=_section(section, keys),
            index_heads=keys.integer("indexer_n_heads"),
            index_dim=keys.integer("indexer_head_dim"),
            index_budget=keys.integer("indexer_budget"),
            index_ratio=keys.integer("indexer_compress_ratio"),
            gdn_key_heads=keys.integer("linear_num_key_heads"),
            gdn_value_heads=keys.integer("linear_num_value_heads"),
            gdn_head_dim=keys.integer("linear_key_head_dim"),
            gdn_conv_kernel=keys.integer("linear_conv_kernel_dim"),
            experts=keys.integer("num_experts"),
            experts_a_token=keys.integer("num_experts_per_tok"),
            expert_width=keys.integer("moe_intermediate_size"),
            shared_width=keys.integer("shared_expert_intermediate_size"),
            streams=keys.integer("hc_count"),
            stream_rank=keys.integer("hc_lowrank"),
            ple=_hf_ple(keys),
            head_order="grouped",
            tied_head=bool(
                outer.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
            ),
            image_token_id=image if isinstance(image, int) else None,
        ),
        where,
    )


def _hf_text(
    config: Mapping[str, object], where: str
) -> tuple[Mapping[str, object], Mapping[str, object]]:
    kind = config.get("model_type")
    if kind == "qwen4_exp_text":
        return config, config
    if kind == "qwen4_exp":
        return mapping(config.get("text_config"), "text_config", where), config
    raise ArchitectureUnsupported(
        f"{where}: model_type is {kind!r}; civetta runs qwen4_exp (Qwen3.8-Flash-Next) only"
    )


def _hf_kinds(keys: Keys) -> tuple[LayerKind, ...]:
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    words = keys.get("layer_types")
    if words is None:
        interval = keys.integer("full_attention_interval", 4)
        return tuple("qsa" if (i + 1) % interval == 0 else "gdn" for i in range(layers))
    known: dict[object, LayerKind] = {
        "linear_attention": "gdn",
        "full_attention": "qsa",
        "indexed_attention": "qsa",
    }
    if (
        not isinstance(words, list)
        or len(words) != layers
        or not all(isinstance(w, str) and w in known for w in words)
    ):
        raise keys.wrong(
            "layer_types", words, f"{layers} names of linear_attention, full_attention"
        )
    return tuple(known[w] for w in words)


def _hf_ple(keys: Keys) -> PleConfig | None:
    ids = keys.integers("ple_layer_ids") or ()
    if not ids:
        return None
    if len(ids) != 1:
        raise keys.wrong("ple_layer_ids", list(ids), "a list of one layer")
    eos = keys.get("eos_token_id")
    if isinstance(eos, list) and eos:
        eos = eos[0]
    if isinstance(eos, bool) or not isinstance(eos, int) or eos < 0:
        raise keys.wrong("eos_token_id", eos, "a token id")
    size = keys.integer("ngram_size", low=2, high=8)
    return PleConfig(
        layer=ids[0] - 1,
        embed=keys.integer("ple_embed_dim"),
        conv_kernel=keys.integer("ple_conv_kernel_size"),
        conv_dilation=size,
        hash=make_hash(
            vocab=keys.integer("vocab_size"),
            size=size,
            heads_per_ngram=keys.integer("heads_per_ngram", high=256),
            base=keys.integer("ngram_vocab_size_base"),
            seed=keys.integer("seed", 1234, low=0),
            eos_token_id=eos,
            divisor=keys.integer("make_ngram_vocab_size_divisible_by", 128),
        ),
    )


def from_gguf(
    metadata: Mapping[str, object], where: str, *, has_indexer: bool, vocab: int
) -> ModelConfig:
    """Config of a GGUF trunk file (C.1). `has_indexer`: its full layers carry indexer tensors;
    then compress ratios of 0 mean 4 (C.6: a converter fault writes zeros). `vocab`: rows of the
    embedding, which no key states."""
    arch = metadata.get("general.architecture")
    if arch != "qwen4exp":
        raise ArchitectureUnsupported(
            f"{where}: general.architecture is {arch!r};"
            " civetta runs qwen4exp (Qwen3.8-Flash-Next) only"
        )
    keys = Keys(metadata, where, "qwen4exp.")
    if keys.integer("attention.value_length") != keys.integer("attention.key_length"):
        raise keys.wrong("attention.value_length", keys.get("attention.value_length"), "key_length")
    kinds = _gguf_kinds(keys)
    state, value_heads = keys.integer("ssm.state_size"), keys.integer("ssm.time_step_rank")
    if keys.integer("ssm.inner_size") != state * value_heads:
        raise keys.wrong(
            "ssm.inner_size", keys.get("ssm.inner_size"), "state_size * time_step_rank"
        )
    image = keys.get("ple.image_token_id")
    section = keys.integers("rope.dimension_sections") or ()
    return _checked(
        ModelConfig(
            hidden=keys.integer("embedding_length"),
            vocab=vocab,
            context_tokens=keys.integer("context_length"),
            layer_kinds=kinds,
            rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
            heads=keys.integer("attention.head_count"),
            kv_heads=_gguf_kv_heads(keys),
            head_dim=keys.integer("attention.key_length"),
            rope_dims=keys.integer("rope.dimension_count"),
            rope_theta=keys.number("rope.freq_base"),
            mrope_section=_section(section[:3], keys),
            index_heads=keys.integer("attention.indexer.head_count"),
            index_dim=keys.integer("attention.indexer.key_length"),
            index_budget=keys.integer("attention.indexer.top_k"),
            index_ratio=_gguf_ratio(keys, kinds, has_indexer=has_indexer),
            gdn_key_heads=keys.integer("ssm.group_count"),
            gdn_value_heads=value_heads,
            gdn_head_dim=state,
            gdn_conv_kernel=keys.integer("ssm.conv_kernel"),
            experts=keys.integer("expert_count"),
            experts_a_token=keys.integer("expert_used_count"),
            expert_width=keys.integer("expert_feed_forward_length"),
            shared_width=keys.integer("expert_shared_feed_forward_length"),
            streams=keys.integer("hyper_connection.count"),
            stream_rank=keys.integer("hyper_connection.low_rank"),
            ple=_gguf_ple(keys),
            head_order="tiled",
            image_token_id=image if isinstance(image, int) else None,
        ),
        where,
    )


def _gguf_kinds(keys: Keys) -> tuple[LayerKind, ...]:
    layers = keys.integer("block_count", high=MOST_LAYERS)
    layers -= keys.integer("nextn_predict_layers", 0, low=0, high=layers)
    recurrent = keys.get("attention.recurrent_layers")
    if recurrent is None:
        interval = keys.integer("full_attention_interval", 4)
        return tuple("qsa" if (i + 1) % interval == 0 else "gdn" for i in range(layers))
    flags = recurrent.tolist() if hasattr(recurrent, "tolist") else recurrent
    if not isinstance(flags, list) or len(flags) < layers:
        raise keys.wrong("attention.recurrent_layers", recurrent, f"{layers} booleans")
    return tuple("gdn" if flag else "qsa" for flag in flags[:layers])


def _gguf_kv_heads(keys: Keys) -> int:
    several = keys.get("attention.head_count_kv")
    if isinstance(several, int):
        return keys.integer("attention.head_count_kv")
    counts = {x for x in keys.integers("attention.head_count_kv") or () if x > 0}
    if len(counts) != 1:
        raise keys.wrong("attention.head_count_kv", several, "one count of key/value heads")
    return counts.pop()


def _gguf_ratio(keys: Keys, kinds: tuple[LayerKind, ...], *, has_indexer: bool) -> int:
    ratios = keys.integers("attention.compress_ratios") or ()
    found = {r for r, kind in zip(ratios, kinds, strict=False) if kind == "qsa" and r != 0}
    if len(found) > 1:
        raise keys.wrong("attention.compress_ratios", list(ratios), "the same on every full layer")
    if found:
        return found.pop()
    return 4 if has_indexer else keys.integer("attention.indexer.top_k")


def _gguf_ple(keys: Keys) -> PleConfig | None:
    layers = keys.integers("ple.layers") or ()
    if not layers:
        return None
    if len(layers) != 1:
        raise keys.wrong("ple.layers", list(layers), "a list of one layer")
    size, heads = (
        keys.integer("ple.ngram_size", low=2, high=8),
        keys.integer("ple.heads_per_ngram", high=256),
    )
    total = (size - 1) * heads
    found = [keys.integers(f"ple.{name}") for name in ("layer_multipliers", "head_vocab_sizes")]
    if found[0] is None or len(found[0]) != size or min(found[0]) < 1:
        raise keys.wrong("ple.layer_multipliers", found[0], f"{size} positive integers")
    if found[1] is None or len(found[1]) != total or min(found[1]) < 1:
        raise keys.wrong("ple.head_vocab_sizes", found[1], f"{total} positive integers")
    offsets = keys.integers("ple.head_offsets")
    if offsets is None or len(offsets) != total or min(offsets) < 0:
        raise keys.wrong("ple.head_offsets", offsets, f"{total} integers")
    width = keys.integer("embedding_length_per_layer_input")
    rows = max(o + v for o, v in zip(offsets, found[1], strict=True))
    return PleConfig(
        layer=layers[0],
        embed=width * total,
        conv_kernel=keys.integer("ple.conv_kernel"),
        conv_dilation=size,
        hash=NgramHash(
            size=size,
            heads_per_ngram=heads,
            multipliers=found[0],
            vocab_sizes=found[1],
            offsets=offsets,
            eos_token_id=keys.integer("ple.eos_token_id", low=0),
            rows=rows,
        ),
    )


def _section(section: tuple[int, ...], keys: Keys) -> tuple[int, int, int]:
    if len(section) != 3 or min(section) < 0:
        raise keys.wrong("mrope section", list(section), "three frequency counts (t, h, w)")
    return section[0], section[1], section[2]


def _checked(c: ModelConfig, where: str) -> ModelConfig:
    """Relations the kernels rely on; each refusal names the sizes at fault."""
    faults = [
        (c.heads % c.kv_heads, f"{c.heads} heads are no multiple of {c.kv_heads} kv heads"),
        (
            c.gdn_value_heads % c.gdn_key_heads,
            f"{c.gdn_value_heads} GDN value heads are no multiple of {c.gdn_key_heads} key heads",
        ),
        (c.rope_dims % 2, f"{c.rope_dims} rotary dimensions are odd"),
        (c.rope_dims > min(c.head_dim, c.index_dim), "more rotary dimensions than a head has"),
        (
            sum(c.mrope_section) != c.rope_dims // 2,
            f"mrope section {c.mrope_section} does not sum to {c.rope_dims // 2}",
        ),
        (c.index_budget % c.index_ratio, "the index budget is no multiple of its ratio"),
        (64 % c.index_ratio, f"index ratio {c.index_ratio} does not divide a page of 64 tokens"),
        (c.experts_a_token > c.experts, "more experts a token than there are experts"),
        (c.layers > 4096 or c.experts > 65536 or c.vocab < 1, "implausible sizes"),
    ]
    if c.ple is not None:
        faults += [
            (not 0 <= c.ple.layer < c.layers, f"n-gram layer {c.ple.layer} is not in the model"),
            (c.ple.embed % c.ple.hash.heads, "the n-gram width is no multiple of its heads"),
        ]
    for fault, text in faults:
        if fault:
            raise CheckpointMalformed(f"{where}: {text}; the file is damaged or not this model")
    return c
