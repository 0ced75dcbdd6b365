"""Every kind of image file over HTTP: those that are read give one answer, the others one error.

An encoding that keeps its pixels has to give the answer of the plain PNG of the same picture, to the
last bit of its log-probabilities. What cannot be used is a 400 in all three dialects.
"""

from __future__ import annotations

import asyncio
import base64
import re

import numpy as np
import pytest
from PIL import Image

import clips
import pictures
import tiny_vision
from api.serving import error_of, http
from civetta.api.app import build_app
from civetta.cli.engine_setup import build_engine
from civetta.config import load_settings
from malformed import MALFORMED, png_of

pytestmark = pytest.mark.timeout(120)
GOOD = pictures.encoded(pictures.flat(64, 64, "red"))
NOISE = pictures.noise(96, 64, 3)
TEAL = pictures.flat(96, 64, "teal")
WHITE = pictures.flat(64, 64, "white")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = str(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))
    values = {"model": model, "threads": 1, "max_request_bytes": 1 << 27}
    settings = load_settings(values, env={})
    engine = build_engine(settings)
    yield build_app(engine, settings)
    engine.close()


def ask(app, *bodies):
    """Replies to requests that came one after the other: (path, body) each."""

    async def run():
        async with http(app) as client:
            return [await client.post(path, json=body) for path, body in bodies]

    return asyncio.run(run())


def base64_of(data):
    return base64.b64encode(data).decode()


def chat(*urls):
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}


def responses(*urls):
    content = [{"type": "input_image", "image_url": url} for url in urls]
    return "/v1/responses", {"input": [{"role": "user", "content": content}]}


def messages(*urls):
    def source(url):
        head, _, data = url.partition(",")
        media_type = head.removeprefix("data:").partition(";")[0]
        return {"type": "base64", "media_type": media_type, "data": data}

    content = [{"type": "image", "source": source(url)} for url in urls]
    return "/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": content}]}


PLACES = {
    chat: "messages[0].content[1].image_url.url",
    responses: "input[0].content[1].image_url",
    messages: "messages[0].content[1].source.data",
}


# What is read


def turned(picture, orientation):
    """A PNG of the picture's pixels turned away, with EXIF data that turn them back."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    away = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}[orientation]
    return pictures.encoded(picture.transpose(away), exif=exif)


def half_clear(colour):
    """The left half shows, the right one is clear black."""
    picture = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    picture.paste(Image.new("RGBA", (32, 64), colour), (0, 0))
    return picture


def half_white(colour):
    picture = pictures.flat(64, 64, "white")
    picture.paste(pictures.flat(32, 64, colour), (0, 0))
    return picture


def deep(picture):
    """A PNG with 16 bits a channel, whose lower halves are noise or the value again."""
    pixels_HWC = np.asarray(picture).astype(">u2") * 257
    return png_of(picture.width, picture.height, 16, 2, pixels_HWC.tobytes())


GREY = Image.fromarray(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16)
READ = {
    "bmp": (NOISE, "image/bmp", pictures.encoded(NOISE, "BMP")),
    "webp": (NOISE, "image/webp", pictures.encoded(NOISE, "WEBP", lossless=True)),
    "jpeg": (WHITE, "image/jpeg", pictures.encoded(WHITE, "JPEG")),
    "progressive jpeg": (WHITE, "image/jpeg", pictures.encoded(WHITE, "JPEG", progressive=True)),
    "cmyk jpeg": (
        WHITE,
        "image/jpeg",
        pictures.encoded(Image.new("CMYK", (64, 64), (0, 0, 0, 0)), "JPEG", quality=95),
    ),
    "gif": (TEAL, "image/gif", pictures.encoded(TEAL, "GIF")),
    "first frame of a gif": (
        TEAL,
        "image/gif",
        clips.animated([TEAL, pictures.flat(96, 64, "red")], "GIF"),
    ),
    "first frame of a webp": (
        TEAL,
        "image/webp",
        clips.animated([TEAL, pictures.flat(96, 64, "red")], "WEBP"),
    ),
    "palette": (TEAL, "image/png", pictures.encoded(TEAL.convert("P", palette=1))),
    "black and white": (WHITE, "image/png", pictures.encoded(WHITE.convert("1"))),
    "16-bit colour": (NOISE, "image/png", deep(NOISE)),
    "16-bit grey": (
        Image.fromarray(((np.asarray(GREY).astype(int) * 255 + 32767) // 65535).astype(np.uint8)),
        "image/png",
        pictures.encoded(GREY),
    ),
    "exif half turn": (NOISE, "image/png", turned(NOISE, 3)),
    "exif quarter turn": (NOISE, "image/png", turned(NOISE, 6)),
    "alpha": (half_white("navy"), "image/png", pictures.encoded(half_clear("navy"))),
    "alpha in webp": (
        half_white("navy"),
        "image/webp",
        pictures.encoded(half_clear("navy"), "WEBP", lossless=True),
    ),
    "one pixel": (
        pictures.flat(64, 64, "navy"),
        "image/png",
        pictures.encoded(pictures.flat(1, 1, "navy")),
    ),
}


def answers(app, urls):
    more = {"max_tokens": 3, "temperature": 0, "logprobs": True, "reasoning_effort": "none"}
    bodies = [(path, {**body, **more}) for path, body in map(chat, urls)]
    replies = ask(app, *bodies)
    assert [reply.status_code for reply in replies] == [200] * len(urls)
    return [reply.json()["choices"][0]["logprobs"]["content"] for reply in replies]


@pytest.mark.parametrize("name", READ)
def test_every_encoding_gives_the_answer_of_the_plain_picture(served, name) -> None:
    picture, media_type, data = READ[name]
    plain = pictures.encoded(picture.convert("RGB"))
    assert data != plain
    wanted, found, other = answers(
        served,
        [
            pictures.data_url(plain),
            pictures.data_url(data, media_type),
            pictures.data_url(pictures.encoded(pictures.noise(*picture.size, 9))),
        ],
    )
    assert found == wanted != other


# What is not


@pytest.mark.parametrize("name", MALFORMED)
def test_what_cannot_be_used_is_named_in_every_dialect(served, name) -> None:
    data, words = MALFORMED[name]
    first, second = pictures.data_url(GOOD), f"data:image/png;base64,{base64_of(data)}"
    if data[:4] != GOOD[:4]:
        words = f"{words}|is declared as PNG but its bytes are"
    refused(served, first, second, words)


BROKEN = {
    "no base64": ("data:image/png;base64,!!!", "its base64 is broken"),
    "cut base64": (pictures.data_url(GOOD)[:-3], "its base64 is broken"),
    "base64 of URLs": ("data:image/png;base64,-_-_", "its base64 is broken"),
    "label of another format": (
        pictures.data_url(GOOD, "image/jpeg"),
        "declared as JPEG but .* PNG",
    ),
    "label of a format that is not read": (pictures.data_url(GOOD, "image/tiff"), "'image/tiff'"),
    "label of no image": (pictures.data_url(GOOD, "text/plain"), "'text/plain'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_data_url_is_named_in_every_dialect(served, name) -> None:
    url, words = BROKEN[name]
    refused(served, pictures.data_url(GOOD), url, words)


def refused(app, first, second, words):
    """The second image is at fault, wherever it is sent; the first one alone is fine."""
    for reply, place in zip(
        ask(app, *(dialect(first, second) for dialect in PLACES)), PLACES.values(), strict=True
    ):
        assert reply.status_code == 400, reply.text
        error = error_of(reply)
        assert error["code"] == "invalid_image"
        assert error["param"] == place
        assert error["message"].startswith("Image 2 cannot be used: ")
        assert re.search(words, error["message"])
