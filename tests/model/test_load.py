from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tiny_logits import TINY, hf_logits, logits, near, same

import tiny as writers
import tiny_gguf
from civetta import errors
from civetta.chat.tokenizer import Tokenizer
from civetta.checkpoint.quant import QuantTensor
from civetta.checkpoint.source import Checkpoint, open_checkpoint
from civetta.kernels.select import REFERENCE
from civetta.model.build import TableOptions, check_checkpoint, load_trunk
from civetta.model.tiny import write_tiny
from civetta.ngram.placement import StoreOptions

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


# GGUF forms


def test_gguf_float32(gguf_file, original):
    same(logits(gguf_file), original)


FORMAT_ERRORS = {
    Type.F16: 0.01, Type.BF16: 0.01, Type.Q8_0: 0.05, Type.Q5_1: 0.3, Type.Q5_0: 0.3,
    Type.Q4_1: 0.5, Type.Q4_0: 0.6, Type.IQ4_NL: 0.6,
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMAT_ERRORS, ids=lambda kind: kind.name)
def test_gguf_types(tmp_path, original, kind):
    metadata, tensors = tiny_gguf.gguf_metadata(TINY), tiny_gguf.gguf_tensors(TINY)
    found = logits(tiny_gguf.write_gguf(tmp_path / "x.gguf", metadata, tensors, kind))
    real = tiny_gguf.dequantized(tensors, kind)
    same(found, logits(tiny_gguf.write_gguf(tmp_path / "real.gguf", metadata, real)))
    near(found, original, FORMAT_ERRORS[kind])


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_gguf_super_blocks(tmp_path, kind):
    metadata, tensors = tiny_gguf.gguf_metadata(TINY), tiny_gguf.gguf_tensors(TINY)
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", metadata, tensors, kind)
    formats = {info.format.name for info in open_checkpoint(path).tensors.values()}
    assert kind.name in formats
    real = tiny_gguf.dequantized(tensors, kind)
    same(logits(path), logits(tiny_gguf.write_gguf(tmp_path / "real.gguf", metadata, real)))


@pytest.mark.parametrize("part", [1, 2])
def test_a_split_gguf_from_either_part(tmp_path, original, part):
    metadata, tensors = tiny_gguf.gguf_metadata(TINY), tiny_gguf.gguf_tensors(TINY)
    tiny_gguf.write_gguf(tmp_path / "x.gguf", metadata, tensors, parts=2)
    same(logits(tmp_path / f"x-{part:05}-of-00002.gguf"), original)


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
def test_a_fused_gate_up_bank(tmp_path, original, kind):
    fused = tiny_gguf.gguf_tensors(TINY, fuse=True)
    assert "blk.0.ffn_gate_up_exps.weight" in fused
    metadata = tiny_gguf.gguf_metadata(TINY)
    found = logits(tiny_gguf.write_gguf(tmp_path / "x.gguf", metadata, fused, kind))
    split = tiny_gguf.gguf_tensors(TINY)
    same(found, logits(tiny_gguf.write_gguf(tmp_path / "y.gguf", metadata, split, kind)))


@pytest.mark.parametrize("ratios", [None, [0, 0, 0, 0]], ids=["absent", "zero"])
def test_compress_ratios_that_a_converter_lost_still_mean_four(tmp_path, original, ratios):
    metadata = tiny_gguf.gguf_metadata(TINY)
    del metadata["attention.compress_ratios"]
    if ratios is not None:
        metadata["attention.compress_ratios"] = ratios
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", metadata, tiny_gguf.gguf_tensors(TINY))
    same(logits(path), original)


def test_the_text_is_long_enough_for_sparse_attention_to_matter(tmp_path, original):
    dense = hf_logits(tmp_path / "x", writers.make(indexer_budget=4096))
    same(dense[:64], original[:64])
    assert (dense[68:] - original[68:]).abs().max() > 1e-2


@pytest.mark.parametrize("leave", ["attention.recurrent_layers", "ple.image_token_id"])
def test_optional_keys(tmp_path, original, leave):
    metadata = tiny_gguf.gguf_metadata(TINY)
    del metadata[leave]
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", metadata, tiny_gguf.gguf_tensors(TINY))
    same(logits(path), original)


def test_a_shared_gate_of_rank_two(tmp_path, original):
    tensors = tiny_gguf.gguf_tensors(TINY)
    for name in tensors:
        if name.endswith("ffn_gate_inp_shexp.weight"):
            tensors[name] = tensors[name].reshape(1, -1)
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", tiny_gguf.gguf_metadata(TINY), tensors)
    same(logits(path), original)


def test_a_trunk_with_its_draft_head_in_one_file(tmp_path, original):
    draft = tiny_gguf.draft_tensors(TINY, shared=True)
    path = tiny_gguf.write_gguf(
        tmp_path / "x.gguf",
        tiny_gguf.draft_metadata(TINY, shared=False),
        tiny_gguf.gguf_tensors(TINY) | draft,
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
    metadata, tensors = tiny_gguf.gguf_metadata(TINY), tiny_gguf.gguf_tensors(TINY)
    yield tiny_gguf.write_gguf(folder / "q8.gguf", metadata, tensors, Type.Q8_0)
    yield tiny_gguf.write_gguf(folder / "q4.gguf", metadata, tensors, Type.Q4_0)


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
        table = TableOptions(store=StoreOptions(placement="disk"))
        trunk = load_trunk(path, ops=REFERENCE, table=table)
        found = list(matrices(trunk.weights))
        views = [w for w in found if any(a <= w.data_ptr() < b for a, b in handed)]
        mapped = {id(w) for w in views}
        kept = [w for w in found if id(w) not in mapped]
        total = sum(w.nbytes for w in views)
        assert sum(w.nbytes for w in kept) < 0.15 * total
        assert all(w.dtype == torch.float32 for w in kept)  # gains, decays and convolutions
        assert max(w.numel() for w in kept) <= 256 * 4
