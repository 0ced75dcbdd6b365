"""What the page keeps, where, and what of it is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.live import live
from fake_engine import FakeEngine
from page.asking import (
    ask,
    prompt_of,
    reply,
    set_value,
    url,
)

if TYPE_CHECKING:
    from page.chromium import Page


def test_a_key_is_asked_for_once_and_kept_for_the_tab_alone(tab: Page):
    engine = FakeEngine("</think>\n\nopen")
    with live(engine, api_key=("sesame",)) as server:
        tab.open(url(server))
        tab.until("document.querySelector('dialog[open] input[type=password]')")
        tab.type("wrong")
        tab.press("Enter")
        tab.until("document.querySelector('dialog[open] .note.error')")
        tab.run("document.querySelector('dialog input').focus()")
        tab.type("sesame")
        tab.press("Enter")
        tab.until(
            "!document.querySelector('dialog') && document.querySelector('h1').innerText === 'fake-model'"
        )
        assert ask(tab, "Let me in") == "open"
        tab.until("!document.querySelector('.monitor .note.error')")
        assert tab.run("Object.values(sessionStorage)") == ["sesame"]
        assert "sesame" not in tab.run("JSON.stringify(Object.entries(localStorage))")
        tab.open(url(server))
        assert ask(tab, "Again") == "open"
    tab.problems.clear()  # the console tells each 401


def kept(tab: Page) -> int:
    """Conversations in the browser's database, once what was written before is in it."""
    return int(
        tab.run("""new Promise((resolve, reject) => {
          const asked = indexedDB.open("civetta", 1);
          asked.onerror = () => reject(asked.error);
          asked.onsuccess = () => {
            const name = "conversations";
            const counted = asked.result.transaction(name).objectStore(name).count();
            counted.onsuccess = () => { asked.result.close(); resolve(counted.result); };
            counted.onerror = () => reject(counted.error);
          };
        })""")
    )


def test_conversations_survive_a_reload_and_can_be_deleted(tab: Page):
    engine = FakeEngine(lambda request: f"</think>\n\nreply {len(engine.requests)}")
    with live(engine) as server:
        tab.open(url(server))
        ask(tab, "First question")
        tab.click(".sidebar .new")
        tab.until("document.querySelector('.welcome')")
        ask(tab, "Second question")
        assert kept(tab) == 2  # a page that is left at once takes its last write with it
        tab.open(url(server))
        tab.until("document.querySelectorAll('.sidebar li').length === 2")
        assert tab.text(".sidebar li .title") == "Second question"
        tab.click(".sidebar li:last-child .title")
        tab.until("document.querySelector('.markdown')")
        assert reply(tab) == "reply 1"
        assert ask(tab, "More") == "reply 3"
        assert "First question" in prompt_of(engine)
        assert "reply 1" in prompt_of(engine)
        tab.run("window.confirm = () => true")
        tab.click(".sidebar li.current button[aria-label^=Delete]")
        tab.until("document.querySelectorAll('.sidebar li').length === 1")
        assert kept(tab) == 1
        tab.open(url(server))
        tab.until("document.querySelectorAll('.sidebar li').length === 1")


def test_settings_are_sent_kept_and_only_when_valid(tab: Page):
    engine = FakeEngine("plain")
    with live(engine) as server:
        tab.open(url(server))
        tab.click("button[aria-label=Settings]")
        tab.until("document.querySelector('dialog[open]')")
        set_value(tab, "System prompt", "Answer like an owl.")
        set_value(tab, "Thinking", "off")
        set_value(tab, "Temperature", "0.25")
        set_value(tab, "Top-p", "7")  # out of range
        set_value(tab, "Most tokens", "3")
        tab.press("Escape")
        tab.until("!document.querySelector('dialog')")
        tab.open(url(server))
        assert ask(tab, "Who?") == "pla"
        sent = engine.requests[-1]
        assert sent.sampling.temperature == 0.25
        assert sent.sampling.top_p == 0.8  # the preset's
        assert sent.max_tokens == 3
        assert "<|im_start|>system\nAnswer like an owl.<|im_end|>" in prompt_of(engine)
        assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
        assert "token limit" in tab.text(".note")
