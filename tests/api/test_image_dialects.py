"""Images in the Responses and the Messages API, on the tiny model with a tower."""

from __future__ import annotations

import asyncio

import anthropic
import openai
import pytest

import pictures
import tiny_vision
from api.serving import anthropic_sdk, app_of, sdk
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
