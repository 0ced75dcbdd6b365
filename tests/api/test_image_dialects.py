"""Images in the Responses and the Messages API, on the tiny model with a tower."""

from __future__ import annotations

import asyncio

import anthropic
import openai
import pytest

import clips
import pictures
import tiny_vision
from api.serving import anthropic_sdk, app_of, request, sdk
from civetta.cli.engine_setup import build_engine
from civetta.config import load_settings

pytestmark = pytest.mark.timeout(120)
RED, BLUE = (pictures.encoded(pictures.flat(64, 64, colour)) for colour in ("red", "blue"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = str(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))
    engine = build_engine(load_settings({"model": model, "threads": 1}, env={}))
    yield app_of(engine)
    engine.close()


def part(data, media_type="image/png"):
    return {"type": "input_image", "image_url": pictures.data_url(data, media_type)}


def block(data, media_type="image/png"):
    url = pictures.data_url(data, media_type)
    source = {"type": "base64", "media_type": media_type, "data": url.partition(",")[2]}
    return {"type": "image", "source": source}


def responses(app, *items):
    async def run():
        async with sdk(app) as client:
            return await client.responses.create(
                model=(await client.models.list()).data[0].id,
                input=list(items),
                max_output_tokens=4,
                extra_body={"seed": 4},
            )

    return asyncio.run(run())


def messages(app, *turns):
    async def run():
        async with anthropic_sdk(app) as client:
            asked = {
                "model": (await client.models.list()).data[0].id,
                "messages": [{"role": role, "content": content} for role, content in turns],
            }
            done = await client.messages.create(max_tokens=4, extra_body={"seed": 4}, **asked)
            return done, await client.messages.count_tokens(**asked)

    return asyncio.run(run())


def test_responses_read_images_of_users_and_of_tools(served):
    user = {"role": "user", "content": [{"type": "input_text", "text": "See"}, part(RED)]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    seen = {"type": "function_call_output", "call_id": "c", "output": [part(BLUE)]}
    one = responses(served, user)
    two = responses(served, user, call, seen)
    without = responses(served, {"role": "user", "content": "See"})
    grown = one.usage.input_tokens - without.usage.input_tokens
    assert grown > 1
    assert two.usage.input_tokens > one.usage.input_tokens + grown - 2


def test_messages_read_images_of_users_and_of_tools_and_count_them(served):
    user = ("user", [{"type": "text", "text": "See"}, block(RED)])
    call = ("assistant", [{"type": "tool_use", "id": "t", "name": "look", "input": {}}])
    seen = ("user", [{"type": "tool_result", "tool_use_id": "t", "content": [block(BLUE)]}])
    for turns in ((user,), (user, call, seen)):
        done, counted = messages(served, *turns)
        used = done.usage.input_tokens + done.usage.cache_read_input_tokens
        assert used == counted.input_tokens


def screenshot():
    """3456 x 2234 pixels with alpha, as a laptop's whole screen: flat windows and lines of text."""
    picture = pictures.flat(3456, 2234, "white").convert("RGBA")
    for row in range(40, 2200, 60):
        picture.paste("navy", (100, row, 3000 - row, row + 24))
    return pictures.encoded(picture)


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_case_60_a_screenshot_of_a_whole_screen_is_read(served, kind):
    data = screenshot()
    if kind == "messages":
        done, counted = messages(served, ("user", [block(data)]))
        assert counted.input_tokens == done.usage.input_tokens
        used = done.usage.input_tokens
    elif kind == "responses":
        used = responses(served, {"role": "user", "content": [part(data)]}).usage.input_tokens
    else:
        url = {"type": "image_url", "image_url": {"url": pictures.data_url(data)}}
        body = {"messages": [{"role": "user", "content": [url]}], "max_tokens": 2}
        reply = request(served, "POST", "/v1/chat/completions", body=body)
        used = reply.json()["usage"]["prompt_tokens"]
    assert 900 < used < 1100  # the model's limit of 2**20 pixels, kept in its aspect


CURE = r"/v1/chat/completions with a video_url part, or send some of the frames as images"


def test_videos_are_refused_with_the_cure_where_an_api_has_none(served):
    url = pictures.data_url(clips.encoded(clips.greys(4)), "video/mp4")
    for content in (
        {"type": "input_video", "video_url": url},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "video", "video": [pictures.data_url(RED)], "fps": 2},
    ):
        with pytest.raises(openai.BadRequestError, match=CURE) as caught:
            responses(served, {"role": "user", "content": [content]})
        assert caught.value.param == "input[0].content[0]"
        with pytest.raises(anthropic.BadRequestError, match=CURE) as caught:
            messages(served, ("user", [{"type": "text", "text": "See"}, content]))
        assert caught.value.body["error"]["param"] == "messages[0].content[1]"
    seen = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_video"}]}
    with pytest.raises(openai.BadRequestError, match=CURE):
        responses(served, {"role": "user", "content": "See"}, seen)
    with pytest.raises(anthropic.BadRequestError, match="video_url part"):
        messages(served, ("user", [block(RED, "video/mp4")]))


def test_the_model_says_that_it_takes_pictures_and_videos(served):
    listed = request(served, "GET", "/v1/models").json()
    (model,) = listed["data"]
    assert model["modalities"] == ["text", "image", "video"]
    assert listed["models"][0]["input_modalities"] == ["text", "image"]  # what Codex can read


def test_case_60_formats_and_alpha_work_and_others_are_named(served):
    picture = pictures.flat(64, 64, "red")
    clear = picture.convert("RGBA")
    clear.putalpha(120)
    for data, media_type in (
        (pictures.encoded(picture, "WEBP"), "image/webp"),
        (pictures.encoded(picture, "GIF"), "image/gif"),
        (pictures.encoded(clear), "image/png"),
    ):
        messages(served, ("user", [block(data, media_type)]))
        responses(served, {"role": "user", "content": [part(data, media_type)]})
    with pytest.raises(anthropic.BadRequestError, match=r"Image 1 cannot be used: .*tiff"):
        messages(served, ("user", [block(RED, "image/tiff")]))
    with pytest.raises(openai.BadRequestError, match="Image 1 cannot be used"):
        responses(served, {"role": "user", "content": [part(b"no picture")]})


def test_case_62_addresses_are_refused_unless_they_are_allowed(served):
    source = {"type": "url", "url": "http://169.254.169.254/latest"}
    with pytest.raises(anthropic.BadRequestError, match="address on the network") as caught:
        messages(served, ("user", [{"type": "image", "source": source}]))
    assert caught.value.body["error"]["param"] == "messages[0].content[0].source.url"
    address = {"type": "input_image", "image_url": "https://example.invalid/a.png"}
    with pytest.raises(openai.BadRequestError, match="--allow-image-urls"):
        responses(served, {"role": "user", "content": [address]})
