"""The settings in docs/clients: they parse, and name flags that there are."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from civetta.options import all_settings

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs" / "clients").glob("*.md"))
FLAGS = {flag.split()[0]: setting for setting in all_settings().values() for flag in setting.flags}


def test_every_client_has_a_page():
    names = {page.stem for page in PAGES}
    wanted = {"claude-code", "codex", "open-webui", "opencode", "continue", "llama-swap"}
    assert names >= wanted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_settings_parse_and_its_flags_exist(page):
    text = page.read_text(encoding="utf-8")
    for kind, block in re.findall(r"```(json|toml)\n(.*?)```", text, re.DOTALL):
        parsed = json.loads(block) if kind == "json" else tomllib.loads(block)
        assert parsed
    commands = [line for line in text.splitlines() if "civetta serve" in line]
    assert commands
    for line in commands:
        for flag in re.findall(r"(?<= )--[a-z-]+", line.partition("civetta serve")[2]):
            assert flag in FLAGS, flag
