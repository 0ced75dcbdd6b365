"""The draft head written out in float64 numpy, row by row, from model.md B.1, A.6 and E.1.

Keys and values of every row are computed once; each query then attends on its own. Nothing of the
engine is used, so an agreement is between two readings of the text.
"""

from __future__ import annotations

import numpy as np


class HeadReference:
    """Rows of one sequence, one a `step`. `places`: (t, h, w) of each row; without it, text."""

    def __init__(self, tensors, text, *, norm="wide", places=None):
        self.t = {n: np.asarray(v, np.float64) for n, v in tensors.items() if v.dtype != np.int64}
        self.text, self.norm = text, norm
        self.k, self.v, self.raw, self.q_in = [], [], [], []
        self.places = places

    def step(self, token, x_SD):
        """Append the row before `token`, an id or an image's row [D], over streams X_p [S, D].

        Its logits [V] and its streams [S, D].
        """
        p, eps, text = len(self.k), self.text["rms_norm_eps"], self.text
        t = self.t
        table = t["model.language_model.embed_tokens.weight"]
        embedded = table[token] if isinstance(token, int) else np.asarray(token, np.float64)
        e = t["mtp.fc_embedding.weight"] @ (
            rms(embedded, eps) * (1 + t["mtp.pre_fc_norm_embedding.weight"])
        )
        gain = 1 + t["mtp.pre_fc_norm_hidden.weight"]
        if self.norm == "wide":
            h = (rms(x_SD.reshape(-1), eps) * gain).reshape(x_SD.shape)
        else:
            h = rms(x_SD, eps) * gain.reshape(x_SD.shape)
        y = np.stack([t["mtp.fc_hidden.weight"] @ h_j + e for h_j in h])
        x, inject = self.hyper(y, "mtp.layers.0.attn_hyper_connection.")
        y = y + inject[:, None] * self.attention(x, p)
        x, inject = self.hyper(y, "mtp.layers.0.mlp_hyper_connection.")
        y = y + inject[:, None] * self.experts(x)
        mixed, _ = self.hyper(y, "mtp.hyper_connection_mixer.")
        logits = t["lm_head.weight"] @ mixed
        assert text["hc_count"] == len(y)
        return logits, y

    def hyper(self, y, at):
        t, streams = self.t, len(y)
        n = rms(y, self.text["rms_norm_eps"]) * (1 + t[at + "hc_norm.weight"]).reshape(y.shape)
        flat = n.reshape(-1)
        m = silu(t[at + "input_mix_weight_down.weight"] @ flat / streams)
        g = sigmoid(t[at + "input_mix_weight_up.weight"] @ m).reshape(y.shape)
        name = at + "block_inject_weight.weight"
        inject = 2 * sigmoid(t[name] @ flat / streams) if name in t else None
        return (g * n).mean(0), inject

    def attention(self, x, p):
        t, c, at = self.t, self.text, "mtp.layers.0.self_attn."
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        eps, index = c["rms_norm_eps"], c["indexer_head_dim"]
        both = (t[at + "q_proj.weight"] @ x).reshape(heads, 2, dim)
        q = self.rope(rms(both[:, 0], eps) * (1 + t[at + "q_norm.weight"]), p)
        k = (t[at + "k_proj.weight"] @ x).reshape(kv, dim)
        self.k.append(self.rope(rms(k, eps) * (1 + t[at + "k_norm.weight"]), p))
        self.v.append((t[at + "v_proj.weight"] @ x).reshape(kv, dim))
        qk = t[at + "indexer.index_qk_proj.weight"] @ x
        split = c["indexer_n_heads"] * index
        self.raw.append(qk[split:])
        iq = qk[:split].reshape(-1, index)
        iq = self.rope(rms(iq, eps) * (1 + t[at + "indexer.q_layernorm.weight"]), p)
        seen = self.selected(iq, p)
        out = np.empty((heads, dim))
        for head in range(heads):
            group = head // (heads // kv)
            scores = np.array([q[head] @ self.k[s][group] for s in seen]) / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[head] = sum(w * self.v[s][group] for w, s in zip(weights, seen, strict=True))
        return t[at + "o_proj.weight"] @ (out * sigmoid(both[:, 1])).reshape(-1)

    def selected(self, iq, p):
        """Tokens that query p sees: the best blocks by score, ties to the lower, and the tail."""
        c, t = self.text, self.t
        ratio = c["indexer_compress_ratio"]
        keep, blocks = c["indexer_budget"] // ratio, (p + 1) // ratio
        if blocks <= keep:
            return list(range(p + 1))
        gain = 1 + t["mtp.layers.0.self_attn.indexer.k_layernorm.weight"]
        scores = []
        for b in range(blocks):
            mean = np.mean(self.raw[ratio * b : ratio * (b + 1)], axis=0)
            key = self.rope(rms(mean, c["rms_norm_eps"]) * gain, ratio * b)
            scores.append(np.maximum(iq @ key, 0).sum() / np.sqrt(len(key)))
        best = sorted(sorted(range(blocks), key=lambda b: (-scores[b], b))[:keep])
        inside = [ratio * b + i for b in best for i in range(ratio)]
        return inside + list(range(ratio * blocks, p + 1))

    def experts(self, x):
        t, c, at = self.t, self.text, "mtp.layers.0.mlp."
        scores = t[at + "gate.weight"] @ x
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        best = sorted(range(len(weights)), key=lambda e: (-weights[e], e))
        best = best[: c["num_experts_per_tok"]]
        total, y = sum(weights[e] for e in best), 0.0
        for e in best:
            gate, up = np.split(t[at + "experts.gate_up_proj"][e] @ x, 2)
            y = y + weights[e] / total * (t[at + "experts.down_proj"][e] @ (silu(gate) * up))
        one = at + "shared_expert."
        inner = silu(t[one + "gate_proj.weight"] @ x) * (t[one + "up_proj.weight"] @ x)
        mix = sigmoid(t[at + "shared_expert_gate.weight"] @ x)
        return y + mix * (t[one + "down_proj.weight"] @ inner)

    def rope(self, x, row):
        """Text: all three axes are the row; frequency i turns by h or w by turns (model.md D.3)."""
        c = self.text["rope_parameters"]
        half = int(self.text["head_dim"] * c["partial_rotary_factor"]) // 2
        place = np.full(3, row) if self.places is None else self.places[row]
        _, height, width = c["mrope_section"]
        axis = [
            1 if i % 3 == 1 and i < 3 * height else 2 if i % 3 == 2 and i < 3 * width else 0
            for i in range(half)
        ]
        angle = place[axis] * c["rope_theta"] ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half : 2 * half]
        turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        return np.concatenate([*turned, x[..., 2 * half :]], axis=-1)


def rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)
