"""Trained parameters to the tensors of the GGUF files and back (model.md C.2, C.3, C.7, C.8).

A `Piece` says how one stored tensor comes from one parameter. Going back undoes each piece, so a
later stage of training can start from the released files.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from training.trainer.draft import DRAFT, LAYER
from training.trainer.network import ROOT
from training.trainer.tower import PATCH, TOWER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

Arrays = dict[str, np.ndarray]
Change = Literal["same", "gain", "decay", "conv", "flat"]
PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stored tensor, or the left or right part of one.

    `rows` cuts the parameter's second last axis; `change`: gain adds 1, decay is -exp, conv drops
    the middle axis, flat drops the first; `order` then reorders `axis`.
    """

    hf: str
    gguf: str
    rows: tuple[int, int] | None = None
    change: Change = "same"
    order: tuple[int, ...] | None = None
    axis: int = 0

    def store(self, value: np.ndarray) -> np.ndarray:
        """The stored values of a parameter."""
        if self.rows is not None:
            value = value[..., self.rows[0] : self.rows[1], :]
        if self.change == "gain":
            value = value + 1.0
        elif self.change == "decay":
            value = -np.exp(value)
        elif self.change == "conv":
            value = value[:, 0]
        elif self.change == "flat":
            value = value[0]
        return value if self.order is None else np.take(value, self.order, self.axis)

    def restore(self, value: np.ndarray) -> np.ndarray:
        """The parameter, or its rows, from stored values."""
        if self.order is not None:
            value = np.take(value, np.argsort(self.order), self.axis)
        if self.change == "gain":
            return value - 1.0
        if self.change == "decay":
            return np.log(-value)
        if self.change == "conv":
            return value[:, None]
        return value[None] if self.change == "flat" else value


def model_pieces(text: Mapping[str, Any]) -> Iterator[Piece]:
    """The text model."""
    yield Piece(hf=ROOT + "embed_tokens.weight", gguf="token_embd.weight")
    yield Piece(hf="lm_head.weight", gguf="output.weight")
    yield from _hyper(ROOT + "hyper_connection_mixer.", "output_hc_", inject=False)
    for i, kind in enumerate(text["layer_types"]):
        at, to = f"{ROOT}layers.{i}.", f"blk.{i}."
        yield from _block(text, at, to, gdn=kind == "linear_attention")
        if i + 1 in text["ple_layer_ids"]:
            yield from _ple(at + "ple.", to)


def draft_pieces(text: Mapping[str, Any]) -> Iterator[Piece]:
    """The draft head, at the block behind the trunk's."""
    to = f"blk.{text['num_hidden_layers']}."
    yield from _block(text, LAYER, to, gdn=False)
    for name in ("fc_embedding", "fc_hidden"):
        yield Piece(hf=f"{DRAFT}{name}.weight", gguf=to + "nextn.eh_proj.weight")
    for name, stored in (("embedding", "enorm"), ("hidden", "hnorm")):
        yield Piece(
            hf=f"{DRAFT}pre_fc_norm_{name}.weight", gguf=f"{to}nextn.{stored}.weight", change="gain"
        )
    yield from _hyper(DRAFT + "hyper_connection_mixer.", to + "nextn.hc_head_", inject=False)


def vision_pieces(vision: Mapping[str, Any]) -> Iterator[Piece]:
    """The tower, but for its patch projection, which is stored as two slices."""
    names = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}
    names |= {"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}
    pairs = {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
    for i in range(vision["depth"]):
        pairs |= {f"blocks.{i}.{hf}": f"v.blk.{i}.{stored}" for hf, stored in names.items()}
    for hf, stored in pairs.items():
        for end in ("weight", "bias"):
            yield Piece(hf=f"{TOWER}{hf}.{end}", gguf=f"{stored}.{end}")
    yield Piece(hf=TOWER + "pos_embed.weight", gguf="v.position_embd.weight")
    yield Piece(hf=TOWER + "patch_embed.proj.bias", gguf="v.patch_embd.bias")


def _hyper(at: str, to: str, *, inject: bool) -> Iterator[Piece]:
    yield Piece(hf=at + "hc_norm.weight", gguf=to + "norm.weight", change="gain")
    yield Piece(hf=at + "input_mix_weight_down.weight", gguf=to + "down.weight")
    yield Piece(hf=at + "input_mix_weight_up.weight", gguf=to + "up.weight")
    if inject:
        yield Piece(hf=at + "block_inject_weight.weight", gguf=to + "inject.weight")


def _block(text: Mapping[str, Any], at: str, to: str, *, gdn: bool) -> Iterator[Piece]:
    yield from _hyper(at + "attn_hyper_connection.", to + "hc_attn_", inject=True)
    yield from _hyper(at + "mlp_hyper_connection.", to + "hc_ffn_", inject=True)
    if gdn:
        yield from _gdn(text, at + "linear_attn.", to)
    else:
        yield from _qsa(text, at + "self_attn.", to)
    width = text["moe_intermediate_size"]
    both = at + "mlp.experts.gate_up_proj"
    yield Piece(hf=both, gguf=to + "ffn_gate_exps.weight", rows=(0, width))
    yield Piece(hf=both, gguf=to + "ffn_up_exps.weight", rows=(width, 2 * width))
    yield Piece(hf=at + "mlp.experts.down_proj", gguf=to + "ffn_down_exps.weight")
    yield Piece(hf=at + "mlp.gate.weight", gguf=to + "ffn_gate_inp.weight")
    shared = at + "mlp.shared_expert"
    mix = to + "ffn_gate_inp_shexp.weight"
    yield Piece(hf=shared + "_gate.weight", gguf=mix, change="flat")
    for name in ("gate", "up", "down"):
        yield Piece(hf=f"{shared}.{name}_proj.weight", gguf=f"{to}ffn_{name}_shexp.weight")


def _gdn(text: Mapping[str, Any], at: str, to: str) -> Iterator[Piece]:
    """Value heads go from grouped by key head to tiled over key heads."""
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    dim = text["linear_key_head_dim"]
    heads = np.arange(values).reshape(keys, -1).T.reshape(-1)
    rows = (heads[:, None] * dim + np.arange(dim)).reshape(-1)
    channels = np.concatenate([np.arange(2 * keys * dim), 2 * keys * dim + rows])
    by_head, by_row, by_channel = (tuple(x.tolist()) for x in (heads, rows, channels))
    yield Piece(hf=at + "in_proj_qkv.weight", gguf=to + "attn_qkv.weight", order=by_channel)
    yield Piece(hf=at + "in_proj_z.weight", gguf=to + "attn_gate.weight", order=by_row)
    yield Piece(hf=at + "in_proj_a.weight", gguf=to + "ssm_alpha.weight", order=by_head)
    yield Piece(hf=at + "in_proj_b.weight", gguf=to + "ssm_beta.weight", order=by_head)
    conv = to + "ssm_conv1d.weight"
    yield Piece(hf=at + "conv1d.weight", gguf=conv, change="conv", order=by_channel)
    yield Piece(hf=at + "A_log", gguf=to + "ssm_a", change="decay", order=by_head)
    yield Piece(hf=at + "dt_bias", gguf=to + "ssm_dt.bias", order=by_head)
    yield Piece(hf=at + "norm.weight", gguf=to + "ssm_norm.weight")
    yield Piece(hf=at + "out_proj.weight", gguf=to + "ssm_out.weight", order=by_row, axis=1)


def _qsa(text: Mapping[str, Any], at: str, to: str) -> Iterator[Piece]:
    stored = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    for hf, name in stored.items():
        yield Piece(hf=f"{at}{hf}.weight", gguf=f"{to}{name}.weight")
    norms = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    norms |= {f"indexer.{x}_layernorm": f"indexer.{x}_norm" for x in "qk"}
    for hf, name in norms.items():
        yield Piece(hf=f"{at}{hf}.weight", gguf=f"{to}{name}.weight", change="gain")
    split = text["indexer_n_heads"] * text["indexer_head_dim"]
    qk = at + "indexer.index_qk_proj.weight"
    yield Piece(hf=qk, gguf=to + "indexer.q_proj.weight", rows=(0, split))
    k_rows = (split, split + text["indexer_head_dim"])
    yield Piece(hf=qk, gguf=to + "indexer.k_proj.weight", rows=k_rows)


def _ple(at: str, to: str) -> Iterator[Piece]:
    table = at + "ple_embedding.ngram_embedding.shard_0.weight"
    yield Piece(hf=table, gguf="per_layer_token_embd.weight")
    yield Piece(hf=at + "key_proj.weight", gguf=to + "ple_key.weight")
    yield Piece(hf=at + "value_proj.weight", gguf=to + "ple_value.weight")
    for name in ("key", "query", "conv"):
        stored = f"{to}ple_norm_{name}.weight"
        yield Piece(hf=f"{at}norm_{name}.weight", gguf=stored, change="gain")
    yield Piece(hf=at + "conv1d.weight", gguf=to + "ple_conv1d.weight", change="conv")


def stored_tensors(pieces: Iterator[Piece], params: Mapping[str, Tensor]) -> Arrays:
    """float32 arrays by stored name; pieces of one name lie side by side."""
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for piece in pieces:
        parts[piece.gguf].append(piece.store(params[piece.hf].detach().float().cpu().numpy()))
    return {name: np.concatenate(found, -1) for name, found in parts.items()}


def stored_patches(params: Mapping[str, Tensor]) -> Arrays:
    """The patch projection's slices for the two frames."""
    width, values = params[PATCH].shape
    side = round((values // 3) ** 0.5)
    half = (params[PATCH].detach().float().cpu() / 2).view(width, 3, side, side).numpy()
    return dict.fromkeys(PATCHES, half)


def restored(pieces: Iterator[Piece], stored: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Parameters from what files hold, as float32."""
    known = list(pieces)
    sharers: dict[str, list[str]] = defaultdict(list)
    for piece in known:
        sharers[piece.gguf].append(piece.hf)
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for piece in known:
        beside = sharers[piece.gguf]
        value = np.split(stored[piece.gguf], len(beside), -1)[beside.index(piece.hf)]
        parts[piece.hf].append(piece.restore(value))
    return {
        name: torch.from_numpy(np.concatenate(found, -2) if len(found) > 1 else found[0].copy())
        for name, found in parts.items()
    }
