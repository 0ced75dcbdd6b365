from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def docs():
    spec = importlib.util.spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(docs):
    assert docs.TARGET.read_text(encoding="utf-8") == docs.render(), "run python scripts/docs.py"
    http = docs.HTTP_TARGET.read_text(encoding="utf-8")
    assert http == docs.http_docs.render(), "run python scripts/docs.py"
    assert docs.main(["--check"]) == 0


def test_an_old_page_is_noticed_and_renewed(docs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "TARGET", tmp_path / "docs" / "cli.md")
    monkeypatch.setattr(docs, "HTTP_TARGET", tmp_path / "docs" / "http-fields.md")
    assert docs.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
