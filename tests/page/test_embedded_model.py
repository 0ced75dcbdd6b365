"""The page on `civetta serve` with the embedded model: nothing between the person and the weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import pytest
from PIL import Image, ImageDraw

from api.live import until
from page.asking import ask, give_picture, reply, set_value, write
from pictures import encoded, noise
from served import served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from page.chromium import Browser, Page

KEY = "for-the-test"


@pytest.fixture(scope="module")
def site(browser: Browser) -> Iterator[str]:
    with served("--api-key", KEY, "--sessions", "2", "--threads", "1") as base_url:
        yield base_url.removesuffix("v1")


@pytest.fixture
def chat(tab: Page, site: str) -> Page:
    """A tab on the page, let in with the key and set to be the same in every run."""
    tab.open(site)
    tab.until("document.querySelector('dialog[open] input[type=password]')")
    tab.type(KEY)
    tab.press("Enter")
    tab.until("document.querySelector('h1').innerText === 'civetta-nano'")
    tab.problems.clear()  # the console tells the 401 that asked for the key
    tab.click("button[aria-label=Settings]")
    tab.until("document.querySelector('dialog[open]')")
    set_value(tab, "Temperature", "0")
    tab.press("Escape")
    tab.until("!document.querySelector('dialog') && document.querySelector('.monitor .now')")
    return tab


def metric(site: str, name: str) -> float:
    request = Request(f"{site}metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urlopen(request, timeout=20) as response:
        found = re.search(rf"^{name} (\S+)$", response.read().decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def all_have_ended(site: str) -> bool:
    ended = metric(site, "vllm:e2e_request_latency_seconds_count")
    return ended == metric(site, "llamacpp:requests_total")


def test_it_thinks_and_adds(chat: Page):
    assert ask(chat, "What is 17+25?") == "42"
    assert "Thought" in chat.text(".thought summary")
    chat.click(".thought summary")
    chat.until("document.querySelector('.thought[open] .thought-text')?.innerText.length > 5")
    chat.until(
        "/while working/.test(document.querySelector('.speed[aria-label=Decode]').innerText)"
    )


def test_stop_frees_the_session(chat: Page, site: str):
    for _ in range(3):  # a fast machine may have told the story before the mouse is there
        before = metric(site, "llamacpp:requests_cancelled_total")
        write(chat, "Write a story about a fox and a lamp.")
        chat.until(
            "document.querySelector('.message.assistant:last-child :is(.thought, .markdown)')"
        )
        if chat.count("button[aria-label=Stop]"):
            chat.click("button[aria-label=Stop]")
        chat.until("document.querySelector('button[aria-label=Send]')")
        until(lambda: all_have_ended(site))  # the server may still be at its last token
        if metric(site, "llamacpp:requests_cancelled_total") > before:
            break
    assert metric(site, "llamacpp:requests_cancelled_total") == before + 1
    assert metric(site, "llamacpp:requests_processing") == 0
    assert chat.text(".message.assistant:last-child .note") == "Stopped."
    assert ask(chat, "What is 3+4?") == "7"
    chat.problems.clear()  # a DELETE that came after the end is a 404 in the console


@pytest.mark.parametrize("by", ["paste", "drop"])
def test_it_looks_at_a_picture(chat: Page, by: str):
    picture = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(picture).ellipse((60, 60, 190, 190), fill="red")
    give_picture(chat, encoded(picture), by=by)
    chat.until("document.querySelector('.attached img')")
    assert ask(chat, "What colour is the circle?").strip().lower().startswith("red")
    assert chat.count(".message.user .pictures img") == 1
    assert chat.count(".attached") == 0


def test_a_picture_too_large_for_a_request_is_made_smaller(chat: Page):
    png = encoded(noise(2100, 1400), compress_level=1)
    assert len(png) > 8_388_608, "as it is it would be refused"
    give_picture(chat, png, by="paste")
    chat.until("document.querySelector('.attached img')?.naturalWidth")
    width, height, chars = chat.run(
        "((one) => [one.naturalWidth, one.naturalHeight, one.src.length])"
        "(document.querySelector('.attached img'))"
    )
    assert 1000 < width <= 2048
    assert abs(width / height - 1.5) < 0.01
    assert chars < 1_400_000


def test_a_second_turn_begins_from_the_cache(chat: Page):
    ask(chat, "What is 5+6?")
    ask(chat, "What is 7+8?")
    assert "from the cache" in chat.text(".message.assistant:last-child .figures")
    assert reply(chat) == "15"
