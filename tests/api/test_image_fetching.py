"""Addresses of images in requests: a sender who never sends holds up nobody else."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

import pictures
import tiny_vision
from api.serving import http
from civetta.api.app import build_app
from civetta.chat.image_rules import BadImage
from civetta.chat.image_url import ImageFetcher
from civetta.cli.engine_setup import build_engine
from civetta.config import load_settings
from civetta.engine.fetching import MOST_FETCHING

pytestmark = pytest.mark.timeout(240)
RED = pictures.encoded(pictures.flat(64, 64, "red"))
PATHS = {
    "/v1/chat/completions": lambda url: {"type": "image_url", "image_url": {"url": url}},
    "/v1/responses": lambda url: {"type": "input_image", "image_url": url},
    "/v1/messages": lambda url: {"type": "image", "source": {"type": "url", "url": url}},
    "/v1/messages/count_tokens": lambda url: {
        "type": "image",
        "source": {"type": "url", "url": url},
    },
    "/v1/responses/input_tokens": lambda url: {"type": "input_image", "image_url": url},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = str(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))
    values = {"model": model, "threads": 1, "allow_image_urls": True}
    settings = load_settings(values, env={})
    engine = build_engine(settings)
    yield build_app(engine, settings)
    engine.close()


def body(path, *content):
    turns = [{"role": "user", "content": list(content)}]
    if "responses" in path:
        return {"input": turns, **({} if "tokens" in path else {"max_output_tokens": 2})}
    return {"messages": turns, **({} if "tokens" in path else {"max_tokens": 2})}


def picture(path, name="x"):
    return body(path, PATHS[path](f"https://images.test/{name}"))


@pytest.fixture
def sender(monkeypatch):
    """Servers of images that answer once told to; `asked` are the addresses."""
    held = threading.Event()
    asked = []

    def fetch(self, url):
        asked.append(url)
        assert held.wait(200)
        if "missing" in url:
            raise BadImage("images.test answered with status 404")
        return RED

    monkeypatch.setattr(ImageFetcher, "fetch", fetch)
    yield held, asked
    held.set()


@pytest.mark.parametrize("path", PATHS)
def test_an_image_is_fetched_or_named(served, sender, path) -> None:
    sender[0].set()

    async def run():
        async with http(served) as client:
            good = await client.post(path, json=picture(path))
            return good, await client.post(path, json=picture(path, "missing"))

    good, bad = asyncio.run(run())
    assert good.status_code == 200, good.text
    assert bad.status_code == 400
    assert bad.json()["error"]["code"] == "invalid_image"
    assert "Image 1 cannot be used: images.test answered with status 404" in bad.text


def test_others_are_served_while_senders_are_silent(served, sender) -> None:
    """As many requests wait as may; those beyond are told so, and text goes on."""
    held, asked = sender
    shared = min(32, (os.cpu_count() or 1) + 4)  # threads that everybody's requests are read on
    assert shared <= MOST_FETCHING
    path = "/v1/chat/completions"

    async def run():
        async with http(served) as client:
            waiting = [
                asyncio.create_task(client.post(path, json=picture(path, number)))
                for number in range(MOST_FETCHING)
            ]
            while len(asked) < MOST_FETCHING:
                await asyncio.sleep(0.01)
            beyond = await client.post(path, json=picture(path))
            text = body(path, {"type": "text", "text": "Hello"})
            plain = [await client.post(path, json=text) for _ in range(2)]
            assert not any(task.done() for task in waiting)
            held.set()
            return beyond, plain, await asyncio.gather(*waiting)

    beyond, plain, waited = asyncio.run(run())
    assert beyond.status_code == 429
    assert "send them as data URLs" in beyond.json()["error"]["message"]
    assert [reply.status_code for reply in plain] == [200, 200]
    # More may be queued than the engine takes; what it took, it answered.
    codes = {reply.status_code for reply in waited}
    assert 200 in codes
    assert codes <= {200, 429}
