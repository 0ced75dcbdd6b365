"""Closed, full and endless standard streams and files: one sentence, an exit status, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CIVETTA = f"exec {sys.executable} -m civetta"
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


def shell(line: str) -> tuple[int, str, str]:
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_closed_stdout_fails():
    status, _, said = shell(f"{CIVETTA} --version >&-")
    assert status == 1
    assert said.startswith("civetta: error[output_failed]: Cannot write the result to stdout")


def test_a_closed_stderr_loses_messages_only():
    assert shell(f"{CIVETTA} nosuch 2>&-") == (2, "", "")
    assert shell(f"{CIVETTA} nosuch >&- 2>&-") == (2, "", "")


def test_a_closed_stdin_is_empty():
    status, _, said = shell(f"{CIVETTA} prompt - <&-")
    assert (status, "The prompt is empty" in said) == (2, True)


@needs_full
def test_a_full_disk_fails():
    status, _, said = shell(f"{CIVETTA} --version > /dev/full")
    assert status == 1
    assert said.startswith("civetta: error[output_failed]: Cannot write the result to stdout: No")
    assert said.count("\n") == 1
    assert shell(f"{CIVETTA} nosuch 2> /dev/full") == (2, "", "")


@needs_full
def test_a_dump_that_does_not_fit_is_told_by_its_path(civetta, tmp_path):
    ids = tmp_path / "ids"
    ids.write_text("1 2 3")
    result = civetta("probe", "--tokens", str(ids), "--all-logits", "--dump", str(FULL))
    assert result.status == 1
    assert "error[output_failed]: Cannot write the result to /dev/full: No space" in result.err


@pytest.mark.parametrize("command", [["prompt", "-f"], ["probe", "--tokens"]])
def test_endless_files_are_refused(civetta, monkeypatch, command):
    monkeypatch.setattr("civetta.cli.inputs.MAX_TEXT_BYTES", 1000)
    result = civetta(*command, "/dev/zero")
    assert result.status == 2
    assert "/dev/zero has more than 1000 bytes; give a shorter text." in result.err
