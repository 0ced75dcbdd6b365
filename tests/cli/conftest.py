from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from civetta.cli import engine_setup
from civetta.cli.main import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_engine import FakeEngine


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "CIVETTA_CONFIG", "CIVETTA_HOST", "CIVETTA_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def civetta(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command line in this process."""

    def call(*arguments: str) -> Result:
        status = run(arguments)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture
def use_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeEngine], list[object]]:
    """Have commands find this engine; returns the list of settings they asked with."""

    def use(engine: FakeEngine) -> list[object]:
        asked: list[object] = []

        def build(settings: object) -> FakeEngine:
            asked.append(settings)
            return engine

        monkeypatch.setattr(engine_setup, "build_engine", build)
        return asked

    return use
