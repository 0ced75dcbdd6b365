"""Images over HTTP with the SDK that people use, on the tiny model with a tower."""

from __future__ import annotations

import asyncio
import base64

import openai
import pytest

import clips
import pictures
import tiny_vision
from api.serving import sdk
from civetta.api.app import build_app
from civetta.cli.engine_setup import build_engine
from civetta.config import load_settings

pytestmark = pytest.mark.timeout(120)
RED, BLUE = (pictures.encoded(pictures.flat(64, 64, colour)) for colour in ("red", "blue"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = str(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))
    settings = load_settings({"model": model, "max_tokens": 8, "threads": 1}, env={})
    engine = build_engine(settings)
    yield build_app(engine, settings)
    engine.close()


def image(data: bytes, media_type: str = "image/png", **more) -> dict:
    url = pictures.data_url(data, media_type)
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def ask(app, *messages, **more):
    async def run():
        async with sdk(app) as client:
            return await client.chat.completions.create(
                model=(await client.models.list()).data[0].id,
                messages=[{"role": "user", "content": list(parts)} for parts in messages],
                seed=4,
                logprobs=True,
                reasoning_effort="none",
                **more,
            )

    return asyncio.run(run())


def fails(app, *messages, **more) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(app, *messages, **more)
    return caught.value


def answer(reply) -> list:
    return [(item.token, item.logprob) for item in reply.choices[0].logprobs.content]


def test_a_picture_is_answered_and_another_one_otherwise(served) -> None:
    first = ask(served, [image(RED), text("Colour?")])
    assert first.usage.prompt_tokens > 4
    assert answer(ask(served, [image(RED), text("Colour?")])) == answer(first)
    assert answer(ask(served, [image(BLUE), text("Colour?")])) != answer(first)
    again = image(RED, "IMAGE/PNG", detail="auto")
    assert answer(ask(served, [again, text("Colour?")])) == answer(first)


def test_a_stream_says_the_same(served) -> None:
    parts = [image(RED), text("Colour?")]
    whole = ask(served, parts).choices[0].message.content

    async def run():
        async with sdk(served) as client:
            stream = await client.chat.completions.create(
                model=(await client.models.list()).data[0].id,
                messages=[{"role": "user", "content": parts}],
                seed=4,
                stream=True,
                reasoning_effort="none",
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    assert asyncio.run(run()) == whole


def test_images_may_stand_anywhere(served) -> None:
    messages = [
        [text("One"), image(RED), text("two"), image(BLUE)],
        [text("no picture")],
        [image(BLUE, detail="high"), text("three")],
    ]
    assert answer(ask(served, *messages))
    plain = {"type": "image_url", "image_url": pictures.data_url(RED)}
    assert answer(ask(served, [plain, text("x")])) == answer(ask(served, [image(RED), text("x")]))


BAD = {
    "cut": (image(RED[:60]), "damaged or incomplete"),
    "mislabelled": (image(RED, "image/jpeg"), "declared as JPEG but its bytes are PNG"),
    "no image": (image(b"hello"), "no known image format"),
    "tiff": (image(pictures.encoded(pictures.noise(8, 8), "TIFF")), "it is TIFF"),
    "empty": (image(b""), "it is empty"),
    "base64": (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!"}},
        "base64",
    ),
    "address": (
        {"type": "image_url", "image_url": {"url": "https://169.254.169.254/x"}},
        "--allow-image-urls is off",
    ),
    "http": ({"type": "image_url", "image_url": {"url": "http://x/y"}}, "on the network"),
    "strip": (image(pictures.encoded(pictures.flat(4000, 10, "red"))), "200 times"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_a_400_with_index_and_reason(served, name) -> None:
    part, words = BAD[name]
    error = fails(served, [text("first"), image(RED)], [text("then"), part])
    assert error.code == "invalid_image"
    assert error.body["message"].startswith("Image 2 cannot be used: ")
    assert words in error.body["message"]
    assert error.param == "messages[1].content[1].image_url.url"


def test_too_many_images_are_a_context_overflow(served) -> None:
    large = image(pictures.encoded(pictures.flat(1024, 1024, "red")))
    assert fails(served, [large] * 9).code == "context_length_exceeded"


def test_low_detail_is_refused_by_name(served) -> None:
    error = fails(served, [image(RED, detail="low")])
    assert error.param == "messages[0].content[0].image_url.detail"


def test_a_picture_in_a_system_message_is_refused(served) -> None:
    async def run():
        async with sdk(served) as client:
            await client.chat.completions.create(
                model=(await client.models.list()).data[0].id,
                messages=[
                    {"role": "system", "content": [image(RED)]},
                    {"role": "user", "content": "x"},
                ],
            )

    with pytest.raises(openai.BadRequestError, match="move it to a user message"):
        asyncio.run(run())


def test_a_body_of_base64_noise_is_no_crash(served) -> None:
    noise = base64.b64encode(bytes(range(256)) * 8).decode()
    for kind in ("png", "jpeg", "webp", "gif", "bmp"):
        part = {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{noise}"}}
        assert fails(served, [part]).code == "invalid_image"


def video(data: bytes, media_type: str = "video/mp4") -> dict:
    return {"type": "video_url", "video_url": {"url": pictures.data_url(data, media_type)}}


def test_a_video_is_answered_however_it_is_sent(served) -> None:
    frames = [pictures.encoded(frame) for frame in clips.greys(4)]
    listed = {"type": "video", "video": [pictures.data_url(data) for data in frames], "fps": 2.0}
    first = answer(ask(served, [listed, text("What?")]))
    assert first
    joined = {"type": "video", "video": listed["video"]}  # two a second is what is assumed
    assert answer(ask(served, [joined, text("What?")])) == first
    clip = clips.encoded(clips.greys(8))
    found = ask(served, [video(clip), text("What?")])
    assert found.usage.prompt_tokens > 8
    assert answer(found) == answer(ask(served, [video(clip), text("What?")])) != first


@pytest.mark.parametrize(
    ("part", "words", "code"),
    [
        (video(b"junk"), "no known video format", "invalid_video"),
        (
            {"type": "video_url", "video_url": {"url": "https://example.com/x.mp4"}},
            "no data URL",
            "invalid_video",
        ),
        ({"type": "video", "video": ["data:image/png;base64,%"]}, "frame 1", "invalid_video"),
        ({"type": "video", "video": [], "fps": 0.0}, "fps is 0", "invalid_video"),
        ({"type": "video", "video": []}, "no frames", "invalid_video"),
    ],
)
def test_a_video_that_cannot_be_used_is_named(served, part, words, code) -> None:
    error = fails(served, [part])
    assert words in error.body["message"]
    assert error.body["code"] == code
    assert error.body["param"].startswith("messages[0].content[0].video")
