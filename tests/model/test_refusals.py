"""Wrong checkpoints: each refused by the name of what is wrong, before any weight is read."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from tiny_logits import TINY, logits, same, write_hf_with

import tiny as writers
import tiny_gguf
from civetta import errors
from civetta.kernels.select import REFERENCE
from civetta.model.build import check_checkpoint, load_trunk

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
    tensors = tiny_gguf.gguf_tensors(TINY)
    del tensors[name]
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", tiny_gguf.gguf_metadata(TINY), tensors)
    with pytest.raises(errors.TensorMissing, match=f"'{name}'"):
        check_checkpoint(path)


@pytest.mark.parametrize("name", GGUF_TENSORS.values(), ids=GGUF_TENSORS)
def test_gguf_wrong_shape(tmp_path, untouched, name):
    tensors = tiny_gguf.gguf_tensors(TINY)
    if name == GGUF_TENSORS["embed"]:  # its rows are the vocabulary; only its width can be wrong
        tensors[name] = np.repeat(tensors[name], 2, axis=1)
    elif name == GGUF_TENSORS["table"]:  # more rows than the hash needs are padding
        tensors[name] = tensors[name][:100]
    else:
        tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", tiny_gguf.gguf_metadata(TINY), tensors)
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
    tensors = tiny_gguf.gguf_tensors(TINY) | {name: np.zeros(64, np.float32)}
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", tiny_gguf.gguf_metadata(TINY), tensors)
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
    path = tiny_gguf.write_gguf(
        tmp_path / "x.gguf",
        tiny_gguf.gguf_metadata(TINY),
        tiny_gguf.gguf_tensors(TINY),
        arch="llama",
    )
    with pytest.raises(errors.ArchitectureUnsupported, match="llama"):
        check_checkpoint(path)


@pytest.mark.parametrize("shared", [True, False])
def test_a_draft_sidecar_is_no_model(tmp_path, untouched, shared):
    path = tiny_gguf.write_gguf(
        tmp_path / "mtp.gguf",
        tiny_gguf.draft_metadata(TINY, shared=shared),
        tiny_gguf.draft_tensors(TINY, shared=shared),
    )
    with pytest.raises(errors.ArchitectureUnsupported, match=r"draft sidecar \(MTP\)"):
        check_checkpoint(path)


def test_a_vision_sidecar_is_no_model(tmp_path, untouched):
    with pytest.raises(errors.ArchitectureUnsupported, match="mmproj"):
        check_checkpoint(tiny_gguf.write_mmproj(tmp_path / "mmproj.gguf"))


def test_a_folder_of_a_model_and_its_sidecars_is_the_model(tmp_path, gguf_file, original):
    (tmp_path / "tiny.gguf").write_bytes(gguf_file.read_bytes())
    tiny_gguf.write_mmproj(tmp_path / "mmproj.gguf")
    tiny_gguf.write_gguf(
        tmp_path / "mtp.gguf",
        tiny_gguf.draft_metadata(TINY, shared=True),
        tiny_gguf.draft_tensors(TINY, shared=True),
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
    tensors = tiny_gguf.gguf_tensors(TINY) | {name: np.zeros(64, np.float32)}
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", tiny_gguf.gguf_metadata(TINY), tensors)
    with pytest.raises(errors.TensorShapeWrong, match=f"'{name}'"):
        check_checkpoint(path)


def test_a_negative_multiplier_is_refused(tmp_path):
    name = f"{ROOT}layers.1.ple.ple_embedding.layer_multipliers"
    other = TINY.with_tensors({name: -TINY.tensors[name]})
    path = writers.write_hf(tmp_path / "x", TINY.config, writers.stored(other.tensors))
    with pytest.raises(errors.CheckpointMalformed, match="hash"):
        load_trunk(path, ops=REFERENCE)
