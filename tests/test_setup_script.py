"""`scripts/setup.py`: which torch a machine gets, and what is said before it is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[1]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; what it would run is kept in `ran`."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ran = []

    class Done:
        returncode = 0

    def run(command: list[str], **_: object) -> Done:
        module.ran.append(command)
        return Done()

    monkeypatch.setattr(module.subprocess, "run", run)
    return module


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("cpu_only", [True, False])
def test_the_choice_and_its_size_are_told_before(
    setup: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: bool,
    cpu_only: bool,
) -> None:
    monkeypatch.setattr(setup.shutil, "which", lambda name: name if gpu else None)
    monkeypatch.setattr(setup.Path, "exists", lambda _: False)
    setup.install_torch("python", cpu_only=cpu_only)
    (command,) = setup.ran
    said = capsys.readouterr().out
    if gpu and not cpu_only:
        assert "triton" in command
        assert "several gigabytes; stop and run make TORCH=cpu" in said
    else:
        assert f"torch=={setup.CPU_TORCH}+cpu" in command
        assert "gigabytes" not in said
