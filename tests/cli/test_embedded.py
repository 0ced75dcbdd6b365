"""Commands without -m: the model that the package carries answers, and is checked like any other."""

from __future__ import annotations

import pytest

from civetta.cli.main import run
from civetta.model.bind_mtp import find_head
from civetta.model.build import check_checkpoint
from civetta.model.embedded import embedded_model_path

QUESTIONS = {
    "What is 17+25?": "42",
    "What is 60-14?": "46",
    "What is 38+41?": "79",
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("think", ["on", "off"])
def test_it_can_add(question: str, think: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prompt", "--temperature", "0", "--think", think, question]) == 0
    assert capsys.readouterr().out.strip() == QUESTIONS[question]


def test_it_is_whole_and_small() -> None:
    checked = check_checkpoint(embedded_model_path())
    assert checked.config.context_tokens == 16384
    files = list(embedded_model_path().parent.iterdir())
    assert sum(file.stat().st_size for file in files) <= 40_000_000
    head = find_head(checked.checkpoint, checked.config, None)
    assert head is not None
    assert head.checkpoint.path.parent == embedded_model_path().parent
