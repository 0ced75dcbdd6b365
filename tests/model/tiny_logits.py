"""The tiny model's answers to one long text, and how alike two answers are."""

from __future__ import annotations

import numpy as np
import torch

import tiny as writers
from civetta.kernels.select import REFERENCE
from civetta.model.build import load_trunk

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


def write_hf_with(folder, tensors):
    return writers.write_hf(folder, TINY.config, writers.stored(tensors))
