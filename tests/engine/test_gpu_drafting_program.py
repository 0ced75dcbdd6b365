"""benchmarks/gpu_drafting.py on the embedded model and a CPU, without what a bare GPU machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.timeout(240)

LACKING = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"msgspec", "starlette", "uvicorn", "click", "rich", "llguidance"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
"""What civetta needs beyond torch, triton, numpy, tokenizers, jinja2 and pillow is not there."""


def python(code, *args):
    """The code behind LACKING, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", LACKING + code, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "PYTHONPATH": f"{PROGRAMS}:{PROGRAMS.parent / 'src'}"},
    )


def test_the_blocker_blocks():
    for name in ("msgspec", "llguidance", "civetta.engine.load"):
        assert "ModuleNotFoundError" in python(f"import {name}").stderr


def test_it_times_steps_and_rates(tmp_path):
    done = python(
        "import gpu_drafting; gpu_drafting.main()",
        *("--model", "", "--device", "cpu", "--users", "2", "--chances", "0,0.65"),
        *("--tokens", "8", "--repeats", "1", "--save", tmp_path / "out.json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert sorted(report["steps"]["launch_ms"]) == [str(n) for n in range(1, 9)]
    assert sorted(report["speed"]) == ["c=2, forced 0.0", "c=2, forced 0.65"]
    assert sum(report["speed"]["c=2, forced 0.0"]["accepted_by_depth"]) == 0


def test_what_random_weights_need_is_there():
    """Imports alone: the weights themselves need a GPU."""
    pytest.importorskip("triton")
    found = python(
        "import gpu_ahead, civetta.kernels.gpu, civetta.kernels.random_planes\n"
        "import civetta.model.gpu.random, civetta.model.gpu.trunk"
    )
    assert found.returncode == 0, found.stderr
