"""A few rounds of kill_writes.py; by hand it does 200."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kill_writes.py")


@pytest.mark.timeout(120)
def test_kill_9_leaves_whole_states():
    """In a process of its own: it forks, and a fork of the whole test run may find no memory."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(PROGRAM), "--kills", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("10 kills, ")
    assert int(last.split()[2]) > 0
