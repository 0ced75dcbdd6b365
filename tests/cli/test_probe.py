"""`civetta probe`: one hash whatever the batch, rows of decode equal to rows of prefill."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import transformers_oracle as oracle
from click.testing import CliRunner

from civetta.cli.probe import probe
from civetta.errors import CivettaError, UsageError
from civetta.ngram.reader import available_kinds

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB = 320
BATCHES = (64, 128, 512, 2048, 4096, 8192)
LENGTHS = (1, 63, 64, 65, 2047, 2048, 2049, 2050, 2051, 2052, 2053, 6000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the real index budget, so that 2,052 tokens are the first sparse ones."""
    config = oracle.text_config(
        indexer_budget=2048,
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "indexed_attention"],
        num_experts=4,
    )
    folder = tmp_path_factory.mktemp("probe")
    return oracle.save(oracle.random_model(config, seed=2), folder)


def ids(count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, VOCAB, 6100)[:count].tolist()


def token_file(path: Path, tokens: list[int]) -> str:
    path.write_text(" ".join(map(str, tokens)), encoding="utf-8")
    return str(path)


def run(*args: str) -> dict[str, Any]:
    done = CliRunner().invoke(probe, args, catch_exceptions=False, standalone_mode=False)
    report = json.loads(done.output)
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("length", LENGTHS)
def test_batch_does_not_change_the_hash(model: Path, tmp_path: Path, length: int) -> None:
    file = token_file(tmp_path / "ids", ids(length))
    found = [run("-m", str(model), "--tokens", file, "--batch", str(b)) for b in BATCHES]
    assert {r["sha256"] for r in found} == {found[0]["sha256"]}
    assert found[0]["rows"] == 1
    assert found[0]["tokens"] == length


def test_decode_rows_equal_prefill_rows(model: Path, tmp_path: Path) -> None:
    """Across a 64-chunk and across the budget of 2,048, bit for bit; the dump is what was hashed."""
    out = tmp_path / "logits"
    whole = ids(2060)
    one = run(
        "-m", str(model), "--tokens", token_file(tmp_path / "all", whole), "--all-logits",
        "--dump", str(out), "--batch", "512",
    )  # fmt: skip
    rows = np.fromfile(out, "<f4").reshape(one["rows"], one["vocab"])
    assert rows.shape == (2060, VOCAB)
    assert hashlib.sha256(out.read_bytes()).hexdigest() == one["sha256"]
    for start in (1, 60, 127, 1985, 2040):
        stop = min(start + 80, 2060)
        two = run(
            "-m", str(model), "--tokens", token_file(tmp_path / "head", whole[:start]),
            "--decode-tokens", token_file(tmp_path / "tail", whole[start:stop]),
            "--dump", str(out),
        )  # fmt: skip
        assert two["rows"] == 1 + stop - start
        decoded = np.fromfile(out, "<f4").reshape(-1, VOCAB)
        assert np.array_equal(decoded, rows[start - 1 : stop])


def test_placement_reader_and_prefetch_do_not_change_the_hash(model: Path, tmp_path: Path) -> None:
    file, tail = (token_file(tmp_path / n, ids(c)) for n, c in (("ids", 700), ("tail", 9)))
    ways = [
        ["--ngram-placement", "ram"],
        ["--ngram-placement", "disk"],
        ["--ngram-placement", "disk", "--ngram-prefetch", "off", "--ngram-cache-mib", "0"],
        *(["--ngram-placement", "disk", "--ngram-reader", kind] for kind in available_kinds()),
    ]
    found = {
        run(
            "-m", str(model), "--tokens", file, "--decode-tokens", tail, "--batch", batch, *way
        )["sha256"]
        for way in ways
        for batch in ("128", "4096")
    }  # fmt: skip
    assert len(found) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "either as --prompt-file"),
        (["--tokens", "a", "--prompt-file", "b"], "either as --prompt-file"),
        (["--tokens", "missing"], "cannot be read"),
        (["--tokens", "{words}"], "entry 2 is 'x'"),
        (["--tokens", "{large}"], "from 0 to 319"),
        (["--tokens", "{empty}"], "no tokens"),
        (["--tokens", "{good}", "--batch", "0"], "--batch must be"),
        (["--tokens", "{good}", "--decode-file", "a", "--decode-tokens", "b"], "not both"),
        (["--tokens", "{good}", "--dump", "/nowhere/x"], "cannot be written"),
        (["--prompt-file", "{good}"], "no tokenizer"),
    ],
)
def test_wrong_use_is_named(model: Path, tmp_path: Path, args: list[str], words: str) -> None:
    texts = {"words": "1 x", "large": "1 320", "empty": " ", "good": "1 2"}
    files = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        files[name] = str(tmp_path / name)
    with pytest.raises(UsageError, match=words):
        run("-m", str(model), *[a.format(**files) for a in args])


def test_more_tokens_than_the_context(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CivettaError, match="context"):
        run("-m", str(model), "--tokens", token_file(tmp_path / "x", ids(40)), "-c", "32")
