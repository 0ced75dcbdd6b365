"""The page in a real browser, against an engine that types what the test gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.live import live, until
from civetta.types import FinishReason
from fake_engine import FakeEngine
from page.asking import (
    THOUGHT,
    Gate,
    ask,
    give_picture,
    prompt_of,
    reply,
    url,
    write,
)
from pictures import encoded, flat

if TYPE_CHECKING:
    from page.chromium import Page


def test_a_reply_streams_in_with_its_thought_folded_at_the_end(tab: Page):
    text = THOUGHT + "It is **42**."
    gate = Gate(at=20)
    with live(FakeEngine(text, before_token=gate)) as server:
        tab.open(url(server))
        write(tab, "What is 17+25?")
        tab.until("document.querySelector('.thought[open] .thought-text')?.innerText.length > 10")
        assert tab.text(".thought summary") == "Thinking"
        assert reply(tab) == ""
        gate.opened.set()
        tab.until("document.querySelector('.message.assistant .actions')")
        assert reply(tab) == "It is 42."
        assert tab.count(".markdown strong") == 1
        assert tab.count(".thought[open]") == 0
        tab.click(".thought summary")
        tab.until("document.querySelector('.thought[open]')")
        assert tab.text(".thought-text") == "Seventeen and\ntwenty-five."
        assert "tokens at" in tab.text(".figures")


def test_stop_cuts_the_reply_and_tells_the_server_which(tab: Page):
    gate = Gate(at=30)
    engine = FakeEngine("</think>\n\n" + "Once upon a time. " * 20, before_token=gate)
    with live(engine) as server:
        tab.open(url(server))
        write(tab, "A long story")
        assert gate.reached.wait(20)
        tab.until("document.querySelector('.markdown')?.innerText.includes('Once')")
        assert tab.count("button[aria-label=Send]") == 0
        tab.click("button[aria-label=Stop]")
        tab.until("document.querySelector('.note')?.innerText === 'Stopped.'")
        until(
            lambda: (
                ("DELETE", f"{url(server)}v1/requests/{engine.requests[0].request_id}") in tab.sent
            )
        )
        until(lambda: engine.cancelling)
        gate.opened.set()
        until(lambda: engine.finished)
        assert engine.finished[0].reason is FinishReason.CANCELLED
        assert tab.count("button[aria-label=Send]") == 1
        assert reply(tab).startswith("Once")
    tab.problems.clear()  # the DELETE may find the request ended by the cut: that is a 404 in the console


def test_escape_stops_too(tab: Page):
    gate = Gate(at=15)
    engine = FakeEngine("</think>\n\n" + "words " * 50, before_token=gate)
    with live(engine) as server:
        tab.open(url(server))
        write(tab, "Go on")
        assert gate.reached.wait(20)
        tab.press("Escape")
        tab.until("document.querySelector('.note')?.innerText === 'Stopped.'")
        until(lambda: engine.cancelling)
        gate.opened.set()
        until(lambda: engine.finished)
        assert engine.finished[0].reason is FinishReason.CANCELLED
    tab.problems.clear()


def test_an_edited_message_and_a_second_try_replace_what_followed(tab: Page):
    engine = FakeEngine(lambda request: f"</think>\n\nreply {len(engine.requests)}")
    with live(engine) as server:
        tab.open(url(server))
        ask(tab, "one")
        ask(tab, "two")
        tab.click(".message.assistant button[aria-label='Ask again']")
        tab.until("document.querySelectorAll('.message').length === 2")
        tab.until("document.querySelector('.markdown')?.innerText === 'reply 3'")
        tab.until("document.querySelector('.message.assistant .actions')")
        tab.click("button[aria-label='Edit message']")
        tab.until("document.querySelector('.editor textarea')")
        tab.run("document.querySelector('.editor textarea').value = 'changed'")
        tab.click(".editor button[type=submit]")
        tab.until("document.querySelector('.markdown')?.innerText === 'reply 4'")
        assert tab.text(".bubble") == "changed"
        assert "changed" in prompt_of(engine)
        assert "one" not in prompt_of(engine)


def test_the_servers_own_words_are_shown_when_it_refuses(tab: Page):
    with live(FakeEngine(context_tokens=64)) as server:
        tab.open(url(server))
        write(tab, "too long " * 40)
        tab.until("document.querySelector('.note.error')")
        assert "64" in tab.text(".note.error")
        assert tab.count("button[aria-label=Send]") == 1
    tab.problems.clear()


def test_the_page_waits_for_a_model_that_loads(tab: Page):
    with live(None) as server:
        tab.open(url(server))
        tab.until("document.querySelector('.banner')")
        assert "loading" in tab.text(".banner")
        server.app.state.engine = FakeEngine("</think>\n\nhere")
        tab.until("!document.querySelector('.banner')")
        assert ask(tab, "Ready?") == "here"
    tab.problems.clear()


def test_a_text_model_is_given_no_picture(tab: Page):
    with live(FakeEngine()) as server:
        tab.open(url(server))
        tab.until("document.querySelector('h1').innerText === 'fake-model'")
        assert tab.count("button[aria-label='Add pictures']") == 0
        give_picture(tab, encoded(flat(8, 8, "red")), by="paste")
        tab.until("document.querySelector('.composer .note.error')")
        assert tab.count(".attached") == 0
