"""A second sampler, slow and scalar, written from the rules in words and sharing no code."""

from __future__ import annotations

import math
from collections import Counter


def penalize(logits, prompt, generated, p):
    """Logits after penalties, one token at a time."""
    everything = list(prompt) + list(generated)
    if p.repeat_last_n == -1:
        window = set(everything)
    elif p.repeat_last_n == 0:
        window = set()
    else:
        window = set(everything[-p.repeat_last_n :])
    counts = Counter(generated)
    out = []
    for token, logit in enumerate(logits):
        value = float(logit)
        if token in window:
            value = value / p.repeat_penalty if value > 0 else value * p.repeat_penalty
        if token in counts:
            value = value - (p.frequency_penalty * counts[token] + p.presence_penalty)
        out.append(value)
    return out


def survivors(values, p):
    """Set of tokens that temperature, top-k, top-p and min-p leave; None on a knife edge."""
    peak = max(values)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    weight = {token: math.exp((values[token] - peak) / p.temperature) for token in order}
    if p.top_k:
        order = order[: max(p.top_k, p.min_keep)]
    if p.top_p < 1:
        total = math.fsum(weight[token] for token in order)
        kept = []
        for token in order:
            gathered = math.fsum(weight[other] for other in kept)
            if abs(gathered - p.top_p * total) < 1e-9 * total and gathered not in (0.0,):
                return None
            if gathered < p.top_p * total or len(kept) < p.min_keep:
                kept.append(token)
            else:
                break
        order = kept or order[:1]
    if p.min_p > 0:
        if any(abs(weight[token] - p.min_p) < 1e-12 for token in order if weight[token] != 1.0):
            return None
        kept = [token for token in order if weight[token] >= p.min_p]
        order = order[: max(len(kept), p.min_keep)]
    return set(order)


def log_softmax(logits):
    """Log-probabilities with exact sums."""
    peak = max(logits)
    norm = math.log(math.fsum(math.exp(x - peak) for x in logits)) + peak
    return [x - norm for x in logits]
