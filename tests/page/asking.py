"""What a person does with the page, and what they see."""

from __future__ import annotations

import base64
import json
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from api.live import Live
    from fake_engine import FakeEngine
    from page.chromium import Page

BOX = ".composer textarea"
THOUGHT = "Seventeen and\ntwenty-five.\n</think>\n\n"
DONE = "document.querySelector('.message.assistant:last-child .actions')"


class Gate:
    """Holds an engine's reply at token `at` until it is opened."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, index: int) -> None:
        if index == self._at:
            self.reached.set()
            assert self.opened.wait(30)


def url(server: Live) -> str:
    """Where the page of a live server is."""
    host, port = server.address
    return f"http://{host}:{port}/"


def prompt_of(engine: FakeEngine) -> str:
    """The newest prompt that reached the engine, as text."""
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def write(tab: Page, text: str) -> None:
    """Type into the message box and press Enter."""
    tab.run(f"document.querySelector({json.dumps(BOX)}).focus()")
    tab.type(text)
    tab.press("Enter")


def ask(tab: Page, text: str) -> str:
    """Send a message, wait for the whole reply, return what it reads."""
    before = tab.count(".message.assistant")
    write(tab, text)
    tab.until(f"document.querySelectorAll('.message.assistant').length > {before} && {DONE}")
    return reply(tab)


def reply(tab: Page) -> str:
    """The text of the newest reply, without its thought and its figures."""
    return tab.text(".message.assistant:last-child .markdown")


def give_picture(tab: Page, png: bytes, *, by: str) -> None:
    """Paste a picture into the box, or drop it on the page."""
    data = base64.b64encode(png).decode()
    event = {
        "paste": "new ClipboardEvent('paste', { clipboardData: carried, ...shared })",
        "drop": "new DragEvent('drop', { dataTransfer: carried, ...shared })",
    }[by]
    tab.run(
        f"""(() => {{
          const bytes = Uint8Array.from(atob("{data}"), (char) => char.charCodeAt(0));
          const shared = {{ bubbles: true, cancelable: true }};
          const carried = new DataTransfer();
          carried.items.add(new File([bytes], "shot.png", {{ type: "image/png" }}));
          document.querySelector({json.dumps(BOX)}).dispatchEvent({event});
        }})()"""
    )


def set_value(tab: Page, label: str, value: str) -> None:
    """Change the field of the settings whose label begins with `label`."""
    tab.run(
        f"""(() => {{
          const labels = [...document.querySelectorAll("dialog label")];
          const found = labels.find((one) => one.innerText.startsWith({json.dumps(label)}));
          const field = found.querySelector("input, select, textarea");
          field.value = {json.dumps(value)};
          field.dispatchEvent(new Event("input", {{ bubbles: true }}));
          field.dispatchEvent(new Event("change", {{ bubbles: true }}));
        }})()"""
    )
