"""A small round of talks.py: every kind of turn, restarts, and a cold server's replies."""

from __future__ import annotations

import pytest

import tiny_vision
from api.talks import KINDS, differences, talk
from civetta.options import DraftingOptions, ModelOptions

pytestmark = pytest.mark.timeout(300)


def test_random_conversations_are_answered_as_by_a_cold_server(tmp_path):
    model = ModelOptions(model=str(tiny_vision.write(tmp_path / "model")), threads=1)
    folder = tmp_path / "states"
    folder.mkdir()
    log = talk(
        model, folder, users=2, phases=2, turns=6, seed=3, ram_bytes=2_000_000,
        drafting=DraftingOptions(), max_tokens=8,
    )  # fmt: skip
    assert not differences(log, model)
    assert set(log.kinds) >= {*KINDS, "restart"}
    assert len(log.whole) + len(log.parts) >= 24
    assert log.cached > 0
