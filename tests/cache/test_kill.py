"""A few rounds of kill_writes.py; by hand it does 200."""

from __future__ import annotations

import pytest

from cache.kill_writes import run


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_kill_9_leaves_whole_states():
    assert run(10) > 0
