"""`civetta diagnose --benchmark ngram`: a table of rates, an advice, nothing left behind."""

from __future__ import annotations

import json

import pytest
import transformers_oracle as oracle
from click.testing import CliRunner

from civetta.cli import ngram_benchmark
from civetta.cli.diagnose import diagnose
from civetta.ngram.reader import available_kinds

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(ngram_benchmark, "CASE_S", 0.02)
    monkeypatch.setattr(ngram_benchmark, "SCRATCH_BYTES", 16 << 20)
    monkeypatch.chdir(tmp_path)


def run(*args):
    done = CliRunner().invoke(
        diagnose, ["--benchmark", "ngram", *args], catch_exceptions=False, standalone_mode=False
    )
    assert done.return_value == 0
    return done.output


@pytest.mark.parametrize("big_enough", [True, False])
def test_every_reader_at_every_depth(tmp_path, monkeypatch, big_enough):
    folder = oracle.save(oracle.random_model(oracle.text_config(), seed=5), tmp_path / "model")
    if big_enough:
        monkeypatch.setattr(ngram_benchmark, "LEAST_BYTES", 1)
    report = json.loads(run("-m", str(folder), "--json"))
    assert report["scratch"] is not big_enough
    assert {rate["reader"] for rate in report["rates"]} == set(available_kinds())
    assert all(rate["rows_per_s"] > 0 and rate["token_ms"] > 0 for rate in report["rates"])
    best = max(report["rates"], key=lambda rate: rate["rows_per_s"])
    advice = report["advice"]
    assert (advice["reader"], advice["depth"]) == (best["reader"], best["depth"])
    assert advice["prefill_tokens_per_s"] == pytest.approx(best["rows_per_s"] / 8)
    assert advice["placement"] == "ram"
    assert not list(tmp_path.glob("civetta-ngram-*"))


def test_words(tmp_path):
    folder = oracle.save(oracle.random_model(oracle.text_config(), seed=5), tmp_path / "model")
    output = run("-m", str(folder))
    assert "prefill tok/s" in output
    assert "8 rows a token, 32768 a chunk of 4,096" in output
    assert "Advice: --ngram-placement ram; the table of" in output
