from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

import tiny as writers
from civetta import errors
from civetta.chat.tokenizer import Tokenizer
from civetta.checkpoint.quant import QuantTensor
from civetta.checkpoint.source import Checkpoint, open_checkpoint
from civetta.kernels.select import REFERENCE
from civetta.model.build import check_checkpoint, load_trunk
from civetta.model.tiny import default_model_path, write_tiny

TINY = writers.make()
TEXT_IDS = [int(x) for x in np.random.default_rng(5).integers(0, 269, 150)]
TEXT_IDS[40] = TINY.text["eos_token_id"]
EXACT = {"rtol": 1e-4, "atol": 1e-4}


def logits(path):
    trunk = load_trunk(path, ops=REFERENCE)
    session = trunk.store(sessions=1, context_tokens=256).open()
    return trunk.forward(session, TEXT_IDS, "all").clone()


def hf_logits(folder, tiny, tensors=None):
    return logits(writers.write_hf(folder, tiny.config, writers.stored(tensors or tiny.tensors)))


def same(found, wanted):
    torch.testing.assert_close(found, wanted, **EXACT)


def near(found, wanted, error):
    """The mean relative error is that of the format: no more, and not nothing."""
    relative = float((found - wanted).norm() / wanted.norm())
    assert 0 < relative < error, relative


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    found = hf_logits(tmp_path_factory.mktemp("original") / "hf", TINY)
    assert found.std() > 0.1
    assert len(TEXT_IDS) > 100 > TINY.text["indexer_budget"]
    return found


@pytest.fixture
def untouched(monkeypatch):
    """No byte of any tensor may be read."""

    def refuse(self, name):
        raise AssertionError(f"the data of {name} was read")

    monkeypatch.setattr(Checkpoint, "bytes_of", refuse)


# Hugging Face forms


def test_the_packaged_writer_is_deterministic_and_loads(tmp_path, original):
    first, second = write_tiny(tmp_path / "a"), write_tiny(tmp_path / "b")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
    other = write_tiny(tmp_path / "c", seed=1) / "model.safetensors"
    assert other.read_bytes() != (first / "model.safetensors").read_bytes()
    same(logits(first), original)  # its values are exact in bfloat16


def test_f16_folder(tmp_path, original):
    path = writers.write_hf(tmp_path / "x", TINY.config, writers.stored(TINY.tensors, "F16"))
    torch.testing.assert_close(logits(path), original, rtol=1e-3, atol=1e-3)


def test_shards_with_an_index(tmp_path, original):
    path = writers.write_hf(tmp_path / "x", TINY.config, writers.stored(TINY.tensors), shards=3)
    assert len(check_checkpoint(path).checkpoint.files) == 3
    same(logits(path), original)


def test_per_expert_names(tmp_path, original):
    split = writers.per_expert(TINY.tensors)
    assert split.keys() != TINY.tensors.keys()
    same(hf_logits(tmp_path / "x", TINY, split), original)


def test_the_text_only_form(tmp_path, original):
    config, tensors = writers.text_only(TINY)
    assert "indexed_attention" in config["layer_types"]
    same(logits(writers.write_hf(tmp_path / "x", config, writers.stored(tensors))), original)


def test_a_whole_table_in_one_tensor(tmp_path, original):
    tensors = {n: v for n, v in TINY.tensors.items() if not writers.is_table(n)}
    parts = [TINY.tensors[f"{writers.TABLE}shard_{k}.weight"] for k in range(12)]
    tensors[writers.TABLE + "weight"] = np.concatenate(parts)
    same(hf_logits(tmp_path / "x", TINY, tensors), original)


def test_shards_are_stacked_in_numeric_order(tmp_path, original):
    tensors = dict(TINY.tensors)
    two, ten = (f"{writers.TABLE}shard_{k}.weight" for k in (2, 10))
    tensors[two], tensors[ten] = tensors[ten], tensors[two]
    found = hf_logits(tmp_path / "x", TINY, tensors)
    assert (found - original).abs().max() > 1e-2


@pytest.mark.parametrize("width", [32, 160])  # 160 has two blocks of 128, the last one cut
def test_fp8_release(tmp_path, width):
    model = writers.make(moe_intermediate_size=width)
    stored, real = writers.fp8_release(model)
    found = logits(writers.write_hf(tmp_path / "x", model.config, stored))
    same(found, hf_logits(tmp_path / "real", model, writers.fused(real)))
    near(found, hf_logits(tmp_path / "original", model), 0.1)


@pytest.mark.parametrize("form", [writers.nvfp4_release, writers.nvfp4_table])
def test_nvfp4(tmp_path, original, form):
    stored, real = form(TINY)
    found = logits(writers.write_hf(tmp_path / "x", TINY.config, stored))
    same(found, hf_logits(tmp_path / "real", TINY, writers.fused(real)))
    near(found, original, 0.35)


@pytest.mark.parametrize("parts", [1, 12])
def test_an_fp8_table_of_one_shard_or_many_takes_the_one_scale(tmp_path, parts):
    model = writers.make(split_ngram_parts=parts)
    stored, real = writers.fp8_release(model)
    found = logits(writers.write_hf(tmp_path / "x", model.config, stored))
    same(found, hf_logits(tmp_path / "real", model, writers.fused(real)))


def test_constants_in_the_file_win_over_computed_ones(tmp_path, original):
    name = f"{writers.ROOT}layers.1.ple.ple_embedding.layer_multipliers"
    other = TINY.with_tensors({name: TINY.tensors[name] + 2})
    path = writers.write_hf(tmp_path / "x", TINY.config, writers.stored(other.tensors))
    assert load_trunk(path, ops=REFERENCE).config.ple.hash.multipliers == tuple(
        other.tensors[name].tolist()
    )
    assert (logits(path) - original).abs().max() > 1e-2


def test_constants_that_leave_the_table_are_refused(tmp_path):
    name = f"{writers.ROOT}layers.1.ple.ple_embedding.ngram_heads_offsets"
    other = TINY.with_tensors({name: TINY.tensors[name] + 1000})
    path = writers.write_hf(tmp_path / "x", TINY.config, writers.stored(other.tensors))
    with pytest.raises(errors.CheckpointMalformed, match="n-gram table has 288 rows"):
        load_trunk(path, ops=REFERENCE)


def test_vision_and_draft_tensors_are_left_aside_with_a_reason(tmp_path, original):
    extra = {
        "model.visual.pos_embed.weight": np.zeros((4, 4), np.float32),
        "mtp.fc_hidden.weight": np.zeros((64, 64), np.float32),
    }
    path = writers.write_hf(
        tmp_path / "x", TINY.config, writers.stored(TINY.tensors | extra, "BF16")
    )
    ignored = check_checkpoint(path).ignored
    assert ignored.keys() == extra.keys()
    assert all(ignored.values())
    same(logits(path), original)


# GGUF forms


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return writers.write_gguf(path, writers.gguf_metadata(TINY), writers.gguf_tensors(TINY))


def test_gguf_float32(gguf_file, original):
    same(logits(gguf_file), original)


FORMAT_ERRORS = {
    Type.F16: 0.01, Type.BF16: 0.01, Type.Q8_0: 0.05, Type.Q5_1: 0.3, Type.Q5_0: 0.3,
    Type.Q4_1: 0.5, Type.Q4_0: 0.6, Type.IQ4_NL: 0.6,
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMAT_ERRORS, ids=lambda kind: kind.name)
def test_gguf_types(tmp_path, original, kind):
    metadata, tensors = writers.gguf_metadata(TINY), writers.gguf_tensors(TINY)
    found = logits(writers.write_gguf(tmp_path / "x.gguf", metadata, tensors, kind))
    real = writers.dequantized(tensors, kind)
    same(found, logits(writers.write_gguf(tmp_path / "real.gguf", metadata, real)))
    near(found, original, FORMAT_ERRORS[kind])


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_gguf_super_blocks(tmp_path, kind):
    metadata, tensors = writers.gguf_metadata(TINY), writers.gguf_tensors(TINY)
    path = writers.write_gguf(tmp_path / "x.gguf", metadata, tensors, kind)
    formats = {info.format.name for info in open_checkpoint(path).tensors.values()}
    assert kind.name in formats
    real = writers.dequantized(tensors, kind)
    same(logits(path), logits(writers.write_gguf(tmp_path / "real.gguf", metadata, real)))


@pytest.mark.parametrize("part", [1, 2])
def test_a_split_gguf_from_either_part(tmp_path, original, part):
    metadata, tensors = writers.gguf_metadata(TINY), writers.gguf_tensors(TINY)
    writers.write_gguf(tmp_path / "x.gguf", metadata, tensors, parts=2)
    same(logits(tmp_path / f"x-{part:05}-of-00002.gguf"), original)


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
def test_a_fused_gate_up_bank(tmp_path, original, kind):
    fused = writers.gguf_tensors(TINY, fuse=True)
    assert "blk.0.ffn_gate_up_exps.weight" in fused
    metadata = writers.gguf_metadata(TINY)
    found = logits(writers.write_gguf(tmp_path / "x.gguf", metadata, fused, kind))
    split = writers.gguf_tensors(TINY)
    same(found, logits(writers.write_gguf(tmp_path / "y.gguf", metadata, split, kind)))


@pytest.mark.parametrize("ratios", [None, [0, 0, 0, 0]], ids=["absent", "zero"])
def test_compress_ratios_that_a_converter_lost_still_mean_four(tmp_path, original, ratios):
    metadata = writers.gguf_metadata(TINY)
    del metadata["attention.compress_ratios"]
    if ratios is not None:
        metadata["attention.compress_ratios"] = ratios
    path = writers.write_gguf(tmp_path / "x.gguf", metadata, writers.gguf_tensors(TINY))
    same(logits(path), original)


def test_the_text_is_long_enough_for_sparse_attention_to_matter(tmp_path, original):
    dense = hf_logits(tmp_path / "x", writers.make(indexer_budget=4096))
    same(dense[:64], original[:64])
    assert (dense[68:] - original[68:]).abs().max() > 1e-2


@pytest.mark.parametrize("leave", ["attention.recurrent_layers", "ple.image_token_id"])
def test_optional_keys(tmp_path, original, leave):
    metadata = writers.gguf_metadata(TINY)
    del metadata[leave]
    path = writers.write_gguf(tmp_path / "x.gguf", metadata, writers.gguf_tensors(TINY))
    same(logits(path), original)


def test_a_shared_gate_of_rank_two(tmp_path, original):
    tensors = writers.gguf_tensors(TINY)
    for name in tensors:
        if name.endswith("ffn_gate_inp_shexp.weight"):
            tensors[name] = tensors[name].reshape(1, -1)
    path = writers.write_gguf(tmp_path / "x.gguf", writers.gguf_metadata(TINY), tensors)
    same(logits(path), original)


def test_a_trunk_with_its_draft_head_in_one_file(tmp_path, original):
    draft = writers.draft_tensors(TINY, shared=True)
    path = writers.write_gguf(
        tmp_path / "x.gguf",
        writers.draft_metadata(TINY, shared=False),
        writers.gguf_tensors(TINY) | draft,
    )
    assert check_checkpoint(path).ignored.keys() == draft.keys()
    same(logits(path), original)


def test_the_gguf_tokenizer_equals_the_folders(gguf_file, tmp_path):
    ours = Tokenizer.from_folder(write_tiny(tmp_path / "x"))
    theirs = Tokenizer.from_gguf(open_checkpoint(gguf_file).metadata)
    text = "hello <think>é</think><|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert theirs.decode(theirs.encode(text)) == text
    assert (ours.eog_ids, ours.control_ids) == (theirs.eog_ids, theirs.control_ids)


# refusals, all before any weight is read

ROOT = writers.ROOT
HF_TENSORS = {
    "embed": ROOT + "embed_tokens.weight",
    "head": "lm_head.weight",
    "gain": ROOT + "layers.2.mlp_hyper_connection.hc_norm.weight",
    "bank": ROOT + "layers.3.mlp.experts.down_proj",
    "gdn": ROOT + "layers.0.linear_attn.A_log",
    "index": ROOT + "layers.3.self_attn.indexer.index_qk_proj.weight",
    "ple": ROOT + "layers.1.ple.conv1d.weight",
    "constant": ROOT + "layers.1.ple.ple_embedding.layer_multipliers",
}
GGUF_TENSORS = {
    "embed": "token_embd.weight",
    "mixer": "output_hc_up.weight",
    "bank": "blk.2.ffn_down_exps.weight",
    "gdn": "blk.0.ssm_a",
    "index": "blk.3.indexer.q_proj.weight",
    "table": "per_layer_token_embd.weight",
}


def write_hf_with(folder, tensors):
    return writers.write_hf(folder, TINY.config, writers.stored(tensors))


@pytest.mark.parametrize("name", HF_TENSORS.values(), ids=HF_TENSORS)
def test_hf_missing_tensor(tmp_path, untouched, name):
    tensors = {n: v for n, v in TINY.tensors.items() if n != name}
    wanted = "model.embed_tokens.weight" if name.endswith("embed_tokens.weight") else name
    with pytest.raises(errors.TensorMissing, match=f"'{wanted}'"):
        check_checkpoint(write_hf_with(tmp_path / "x", tensors))


@pytest.mark.parametrize("name", HF_TENSORS.values(), ids=HF_TENSORS)
def test_hf_wrong_shape(tmp_path, untouched, name):
    values = TINY.tensors[name]
    tensors = TINY.tensors | {name: np.concatenate([values, values[:1]])}
    with pytest.raises(errors.TensorShapeWrong, match=f"'{name}'"):
        check_checkpoint(write_hf_with(tmp_path / "x", tensors))


@pytest.mark.parametrize("name", GGUF_TENSORS.values(), ids=GGUF_TENSORS)
def test_gguf_missing_tensor(tmp_path, untouched, name):
    tensors = writers.gguf_tensors(TINY)
    del tensors[name]
    path = writers.write_gguf(tmp_path / "x.gguf", writers.gguf_metadata(TINY), tensors)
    with pytest.raises(errors.TensorMissing, match=f"'{name}'"):
        check_checkpoint(path)


@pytest.mark.parametrize("name", GGUF_TENSORS.values(), ids=GGUF_TENSORS)
def test_gguf_wrong_shape(tmp_path, untouched, name):
    tensors = writers.gguf_tensors(TINY)
    if name == GGUF_TENSORS["embed"]:  # its rows are the vocabulary; only its width can be wrong
        tensors[name] = np.repeat(tensors[name], 2, axis=1)
    elif name == GGUF_TENSORS["table"]:  # more rows than the hash needs are padding
        tensors[name] = tensors[name][:100]
    else:
        tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])
    path = writers.write_gguf(tmp_path / "x.gguf", writers.gguf_metadata(TINY), tensors)
    with pytest.raises(errors.TensorShapeWrong, match=f"'{name}'"):
        check_checkpoint(path)


@pytest.mark.parametrize(
    "name", [ROOT + "norm.weight", ROOT + "layers.4.mlp.gate.weight", "model.junk"]
)
def test_hf_surplus_tensor(tmp_path, untouched, name):
    tensors = TINY.tensors | {name: np.zeros(64, np.float32)}
    with pytest.raises(errors.TensorSurplus, match=f"'{name}'"):
        check_checkpoint(write_hf_with(tmp_path / "x", tensors))


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.4.ffn_gate_inp.weight"])
def test_gguf_surplus_tensor(tmp_path, untouched, name):
    tensors = writers.gguf_tensors(TINY) | {name: np.zeros(64, np.float32)}
    path = writers.write_gguf(tmp_path / "x.gguf", writers.gguf_metadata(TINY), tensors)
    with pytest.raises(errors.TensorSurplus, match=f"'{name}'"):
        check_checkpoint(path)


def test_surplus_names_the_first_and_counts_the_rest(tmp_path, untouched):
    tensors = TINY.tensors | {f"junk.{i}": np.zeros(4, np.float32) for i in range(3)}
    with pytest.raises(errors.TensorSurplus, match=r"'junk\.0' and 2 more"):
        check_checkpoint(write_hf_with(tmp_path / "x", tensors))


def test_fp8_without_its_scale(tmp_path, untouched):
    stored, _ = writers.fp8_release(TINY)
    name = ROOT + "layers.2.mlp.experts.1.up_proj.weight_scale"
    del stored[name + "_inv"]
    with pytest.raises(errors.TensorMissing, match=f"'{name}"):
        check_checkpoint(writers.write_hf(tmp_path / "x", TINY.config, stored))


def test_fp8_with_a_scale_of_another_grid(tmp_path, untouched):
    stored, _ = writers.fp8_release(TINY)
    name = ROOT + "layers.2.mlp.experts.1.up_proj.weight_scale_inv"
    stored[name] = ("BF16", np.zeros((2, 1), np.uint16))
    with pytest.raises(errors.TensorShapeWrong, match=f"'{name}'"):
        check_checkpoint(writers.write_hf(tmp_path / "x", TINY.config, stored))


def test_nvfp4_with_scales_of_another_width(tmp_path, untouched):
    stored, _ = writers.nvfp4_release(TINY)
    name = ROOT + "layers.0.mlp.experts.0.gate_proj.weight_scale"
    stored[name] = ("F8_E4M3", np.zeros((32, 2), np.uint8))
    with pytest.raises(errors.TensorShapeWrong, match=f"'{name}'"):
        check_checkpoint(writers.write_hf(tmp_path / "x", TINY.config, stored))


@pytest.mark.parametrize(
    ("name", "dtype", "array"),
    [
        (HF_TENSORS["embed"], "I32", np.int32),  # integers are no weights
        (HF_TENSORS["gain"], "I64", np.int64),
        (HF_TENSORS["bank"], "I8", np.int8),
        (HF_TENSORS["constant"], "F64", np.float64),  # a hash does not survive rounding
        (HF_TENSORS["head"], "F4", np.float32),  # not known at all
    ],
)
def test_hf_wrong_type(tmp_path, untouched, name, dtype, array):
    stored = writers.stored(TINY.tensors)
    stored[name] = (dtype, TINY.tensors[name].astype(array))
    with pytest.raises(errors.TensorTypeUnknown, match=f"'{name}'"):
        check_checkpoint(writers.write_hf(tmp_path / "x", TINY.config, stored))


def test_gguf_unknown_type(tmp_path, gguf_file, untouched):
    data = bytearray(gguf_file.read_bytes())
    name = b"blk.0.attn_qkv.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the rank and two sizes
    assert data[at : at + 4] == bytes(4)  # F32
    data[at] = 99
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(errors.TensorTypeUnknown, match=r"'blk\.0\.attn_qkv\.weight'.* 99"):
        check_checkpoint(path)


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_truncated(tmp_path, gguf_file, untouched, form, keep):
    if form == "hf":
        path = write_hf_with(tmp_path / "x", TINY.tensors)
        file = path / "model.safetensors"
    else:
        path = file = tmp_path / "x.gguf"
        file.write_bytes(gguf_file.read_bytes())
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(errors.CheckpointMalformed, match=file.name):
        check_checkpoint(path)


def test_another_architecture(tmp_path, untouched):
    config = TINY.config | {"model_type": "qwen3_5_moe"}
    path = writers.write_hf(tmp_path / "x", config, writers.stored(TINY.tensors))
    with pytest.raises(errors.ArchitectureUnsupported, match="qwen3_5_moe"):
        check_checkpoint(path)
    path = writers.write_gguf(
        tmp_path / "x.gguf", writers.gguf_metadata(TINY), writers.gguf_tensors(TINY), arch="llama"
    )
    with pytest.raises(errors.ArchitectureUnsupported, match="llama"):
        check_checkpoint(path)


@pytest.mark.parametrize("shared", [True, False])
def test_a_draft_sidecar_is_no_model(tmp_path, untouched, shared):
    path = writers.write_gguf(
        tmp_path / "mtp.gguf",
        writers.draft_metadata(TINY, shared=shared),
        writers.draft_tensors(TINY, shared=shared),
    )
    with pytest.raises(errors.ArchitectureUnsupported, match=r"draft sidecar \(MTP\)"):
        check_checkpoint(path)


def test_a_vision_sidecar_is_no_model(tmp_path, untouched):
    with pytest.raises(errors.ArchitectureUnsupported, match="mmproj"):
        check_checkpoint(writers.write_mmproj(tmp_path / "mmproj.gguf"))


def test_a_folder_of_a_model_and_its_sidecars_is_the_model(tmp_path, gguf_file, original):
    (tmp_path / "tiny.gguf").write_bytes(gguf_file.read_bytes())
    writers.write_mmproj(tmp_path / "mmproj.gguf")
    writers.write_gguf(
        tmp_path / "mtp.gguf",
        writers.draft_metadata(TINY, shared=True),
        writers.draft_tensors(TINY, shared=True),
    )
    same(logits(tmp_path), original)


def test_config_and_weights_that_do_not_belong_together(tmp_path, untouched):
    config = copy.deepcopy(TINY.config)
    config["text_config"]["num_experts"] = 8
    path = writers.write_hf(tmp_path / "x", config, writers.stored(TINY.tensors))
    with pytest.raises(errors.TensorShapeWrong, match=r"\[4, 64\].*\[8, 64\]"):
        check_checkpoint(path)


def test_a_good_model_is_checked_without_reading_a_weight(tmp_path, gguf_file, untouched):
    assert check_checkpoint(gguf_file).config.layers == 4
    assert check_checkpoint(write_hf_with(tmp_path / "x", TINY.tensors)).config.layers == 4
    for form in (writers.fp8_release, writers.nvfp4_release, writers.nvfp4_table):
        stored, _ = form(TINY)
        path = writers.write_hf(tmp_path / form.__name__, TINY.config, stored)
        assert check_checkpoint(path).config.layers == 4


@pytest.mark.parametrize("shape", [(), (24,), (24, 8, 4)])
def test_table_shards_that_are_no_matrix(tmp_path, untouched, shape):
    name = writers.TABLE + "shard_3.weight"
    for form in ("plain", "fp8"):
        stored = writers.fp8_release(TINY)[0] if form == "fp8" else writers.stored(TINY.tensors)
        stored[name] = (stored[name][0], np.zeros(shape, stored[name][1].dtype))
        with pytest.raises(errors.TensorShapeWrong, match=f"'{name}'"):
            check_checkpoint(writers.write_hf(tmp_path / form, TINY.config, stored))


@pytest.mark.parametrize("name", ["token_embd.weight", "per_layer_token_embd.weight"])
def test_gguf_matrices_of_another_rank(tmp_path, untouched, name):
    tensors = writers.gguf_tensors(TINY) | {name: np.zeros(64, np.float32)}
    path = writers.write_gguf(tmp_path / "x.gguf", writers.gguf_metadata(TINY), tensors)
    with pytest.raises(errors.TensorShapeWrong, match=f"'{name}'"):
        check_checkpoint(path)


def test_a_negative_multiplier_is_refused(tmp_path):
    name = f"{ROOT}layers.1.ple.ple_embedding.layer_multipliers"
    other = TINY.with_tensors({name: -TINY.tensors[name]})
    path = writers.write_hf(tmp_path / "x", TINY.config, writers.stored(other.tensors))
    with pytest.raises(errors.CheckpointMalformed, match="hash"):
        load_trunk(path, ops=REFERENCE)


# where the bytes lie


def matrices(value):
    """All weights in a tree of dataclasses and tuples."""
    if isinstance(value, QuantTensor):
        yield value.data_RB
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from matrices(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from matrices(getattr(value, name))


def forms(folder):
    stored, _ = writers.fp8_release(TINY)
    yield writers.write_hf(folder / "fp8", TINY.config, stored)
    stored, _ = writers.nvfp4_release(TINY)
    yield writers.write_hf(folder / "nvfp4", TINY.config, stored)
    yield write_tiny(folder / "bf16")
    metadata, tensors = writers.gguf_metadata(TINY), writers.gguf_tensors(TINY)
    yield writers.write_gguf(folder / "q8.gguf", metadata, tensors, Type.Q8_0)
    yield writers.write_gguf(folder / "q4.gguf", metadata, tensors, Type.Q4_0)


def test_weights_are_views_of_the_files(tmp_path, monkeypatch):
    handed = []
    plain = Checkpoint.bytes_of

    def noted(self, name):
        data = plain(self, name)
        handed.append((data.ctypes.data, data.ctypes.data + data.nbytes))
        return data

    monkeypatch.setattr(Checkpoint, "bytes_of", noted)
    for path in forms(tmp_path):
        handed.clear()
        trunk = load_trunk(path, ops=REFERENCE)
        found = list(matrices(trunk.weights))
        found += list(matrices(trunk._rows._shards))
        views = [w for w in found if any(a <= w.data_ptr() < b for a, b in handed)]
        copies = {id(w): w for w in found}.keys() - {id(w) for w in views}
        kept = [w for w in found if id(w) in copies]
        total = sum(w.nbytes for w in views)
        assert sum(w.nbytes for w in kept) < 0.15 * total
        assert all(w.dtype == torch.float32 for w in kept)  # gains, decays and convolutions
        assert max(w.numel() for w in kept) <= 256 * 4


def test_the_default_model_is_written_once(tmp_path):
    first = default_model_path(tmp_path)
    before = (first / "model.safetensors").stat()
    assert default_model_path(tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    assert check_checkpoint(first).config.layers == 4
    assert json.loads((first / "config.json").read_text())["model_type"] == "qwen4_exp"


def test_many_first_starts_at_once_agree(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda _: default_model_path(tmp_path), range(6)))
    assert len(found) == 1
    assert len(list(found.pop().parent.iterdir())) == 1
