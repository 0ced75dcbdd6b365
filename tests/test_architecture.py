"""Rules about the code itself: import contracts, empty packages, no torch where none belongs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "civetta"
TORCH_FREE = [
    "civetta.api.app",
    "civetta.chat.template",
    "civetta.engine.client",
    "civetta.cli.main",
]
LONGEST_FILE = 400


def test_import_contracts_hold() -> None:
    """Layers, no torch in text and wire code, Triton in kernels alone: see pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_package_files_are_empty() -> None:
    """Importing a submodule runs its package's file; only the top one may say anything."""
    full = [p for p in SOURCE.rglob("__init__.py") if p.stat().st_size and p.parent != SOURCE]
    assert full == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by their bare names: of two alike it collects neither."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_files_stay_small() -> None:
    long = {p.name: n for p in SOURCE.rglob("*.py") if (n := _lines(p)) > LONGEST_FILE}
    long.pop("config.py", None)  # model/config.py: one row a key of two formats
    assert long == {}


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
