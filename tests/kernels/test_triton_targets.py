"""The kernels compile for every GPU that civetta names, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx1151")
"""Every launch for every target: compile_for.py by hand (docs/measurements/h200.md)."""


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_every_kernel_compiles_with_every_format(tmp_path):
    """Each kernel and format for one target in turn; E4M3, which differs, for all of them."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_for.py"), "--rotate", *TARGETS],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,  # a limit for what hangs, not a time: two cores may be busy
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("launches compiled") == len(TARGETS)
