"""The page on a phone, by keyboard, and for a screen reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from api.live import live
from fake_engine import FakeEngine
from page.asking import (
    BOX,
    THOUGHT,
    ask,
    reply,
    url,
    write,
)

if TYPE_CHECKING:
    from page.chromium import Page

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_is_wider_than_a_phone(tab: Page, width: int):
    wide = (
        "```\n"
        + "x" * 300
        + "\n```\n\n| a | b |\n|---|---|\n| "
        + "y" * 300
        + " | z |\n\n"
        + "w" * 300
    )
    tab.window(width, 700, phone=True)
    with live(FakeEngine(THOUGHT + wide)) as server:
        tab.open(url(server))
        tab.click(".welcome .examples button")
        tab.until("document.querySelector('.message.assistant .actions')")
        assert tab.run("document.documentElement.scrollWidth") == width
        assert tab.run("document.querySelector('.thread').scrollWidth") == width
        small = tab.run(
            """[...document.querySelectorAll("main button")].filter((one) => one.checkVisibility())
                 .map((one) => one.getBoundingClientRect())
                 .filter((box) => box.width < 44 || box.height < 44).length"""
        )
        assert small == 0
        assert tab.run("document.querySelector('.box').getBoundingClientRect().bottom") <= 700
        if width < 768:
            tab.click("button[aria-label=Conversations]")
            tab.until("document.querySelector('.sidebar').getBoundingClientRect().left === 0")
            tab.press("Escape")
            tab.until("document.querySelector('.sidebar').getBoundingClientRect().right <= 0")


def test_on_a_phone_enter_ends_a_line_and_the_button_sends(tab: Page):
    tab.window(390, 700, phone=True)
    engine = FakeEngine("</think>\n\nok")
    with live(engine) as server:
        tab.open(url(server))
        write(tab, "a line")
        assert not engine.requests
        assert tab.run(f"document.querySelector('{BOX}').value") == "a line\n"
        tab.click("button[aria-label=Send]")
        tab.until("document.querySelector('.markdown')")
        assert reply(tab) == "ok"


def test_everything_can_be_reached_with_the_tab_key(tab: Page):
    with live(FakeEngine("</think>\n\n```\ncode\n```")) as server:
        tab.open(url(server))
        ask(tab, "Hello")
        tab.run("document.activeElement.blur()")
        seen = []
        for _ in range(40):
            tab.press("Tab")
            name = tab.run(
                "((one) => (one.getAttribute('aria-label') ?? one.innerText).trim())"
                "(document.activeElement)"
            )
            if name in seen:
                break
            seen.append(name)
        for name in (
            "Skip to the message box", "New conversation", "Hello", "Monitor", "Settings",
            "Messages", "Copy message", "Edit message", "Copy code", "Copy reply", "Ask again",
            "Message",
        ):  # fmt: skip
            assert name in seen
        status = tab.run("document.querySelector('[role=status]').textContent")
        assert "code" in status, "the reply is told to those who cannot see it"


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(tab: Page, dark: bool):
    if not AXE.exists():
        pytest.skip("needs `npm install` in web/")
    text = (
        THOUGHT
        + "# Title\n\nA [link](https://example.org), `code`\n\n- [x] task\n\n"
        + "```py\nx\n```\n\n|a|b|\n|-|-|\n|1|2|"
    )
    tab.window(1400, 900, dark=dark)
    with live(FakeEngine(text)) as server:
        tab.open(url(server))
        ask(tab, "Hello")
        tab.until("document.querySelector('.monitor .now')")
        tab.run(AXE.read_text() + "; 0")
        for opened in (False, True):
            if opened:
                tab.click("button[aria-label=Settings]")
                tab.until("document.querySelector('dialog[open]')")
            found = tab.run(
                "axe.run().then((done) => done.violations.map("
                "(one) => [one.id, one.nodes.map((node) => node.html)]))"
            )
            assert found == [], json.dumps(found, indent=1)
