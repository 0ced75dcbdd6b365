"""The kernels compile for every GPU that civetta names, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
# the others (cuda:80, cuda:100, cuda:120, hip:gfx1151) take a minute each: run compile_for.py by hand
TARGETS = ("cuda:90", "hip:gfx942")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles(target, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_for.py"), "--fewest", target],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "launches compiled" in done.stdout
