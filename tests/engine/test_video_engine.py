"""Videos through the engine: prompts, limits, reuse, and what a reply may not depend on."""

from __future__ import annotations

import pytest
from PIL import Image

import clips
import pictures
import tiny_vision
from civetta.chat.image_source import bytes_part
from civetta.chat.message import Conversation, Message, TextPart, text_message
from civetta.chat.video_source import frames_part, video_part
from civetta.engine.client import ChatClient, ReplyOptions
from civetta.engine.load import load_engine
from civetta.engine.protocol import TokenEvent
from civetta.errors import ContextOverflow, VideoInvalid
from civetta.options import CacheOptions, EngineOptions, ModelOptions, Settings
from civetta.types import SamplingOverrides

pytestmark = pytest.mark.timeout(120)
OPTIONS = ReplyOptions(sampling=SamplingOverrides(temperature=1.0, seed=5), max_tokens=8)
RED = pictures.encoded(pictures.flat(96, 64, "red"))
MP4 = clips.encoded(clips.greys(16))
DARK = clips.encoded(clips.greys(16)[::-1])


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    path = str(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))

    def load(cache="off", context=0, **options):
        return load_engine(
            Settings(
                model=ModelOptions(model=path, threads=1, context=context),
                engine=EngineOptions(**{"sessions": 1, **options}),
                cache=CacheOptions(cache=cache, cache_ram_bytes=1 << 26),
            )
        )

    return load


def video(data, index=1):
    return video_part(pictures.data_url(data, "video/mp4"), index=index, param="messages")


def prepared(engine, *parts):
    made = tuple(TextPart(text=part) if isinstance(part, str) else part for part in parts)
    conversation = Conversation(messages=(Message(role="user", parts=made),))
    return ChatClient(engine).prepare(conversation, OPTIONS).request


def reply_of(engine, request):
    events = list(engine.submit(request))
    ids = [(event.token_id, event.logprob) for event in events if isinstance(event, TokenEvent)]
    return ids, events[-1].usage


def test_a_prompt_holds_times_and_frames(engine_of):
    with engine_of() as engine:
        request = prepared(engine, "Look: ", video(MP4), " and ", bytes_part(RED, index=1))
        tokenizer, support = engine.tokenizer, engine.info.images
    kinds = [request.prompt_ids[item.position] for item in request.images]
    assert kinds == [support.video_token_id] * 2 + [support.token_id]
    assert [item.image.frames for item in request.images] == [2, 2, 1]
    assert len({item.image.tokens for item in request.images[:2]}) == 1
    text = tokenizer.decode(request.prompt_ids)
    for seconds in ("<0.3 seconds>", "<1.6 seconds>"):  # frames 0, 5, 10, 15 at eight a second
        assert f"{seconds}<|vision_start|><|video_pad|>" in text


def test_neither_chunks_nor_company_nor_the_cache_change_a_reply(engine_of):
    with engine_of() as engine:
        request = prepared(engine, "What moves in ", video(MP4), "?")
        alone, _ = reply_of(engine, request)
        assert len(alone) == 8
    with engine_of(cache="on", sessions=2, prefill_chunk=8, prefill_batch=16) as engine:
        other = engine.submit(prepared(engine, video(DARK), " Hello " * 9))
        assert reply_of(engine, request)[0] == alone
        list(other)
        again, usage = reply_of(engine, request)
        assert (again, usage.cached_tokens) == (alone, usage.prompt_tokens - 1)
        dark, usage = reply_of(engine, prepared(engine, "What moves in ", video(DARK), "?"))
        assert dark != alone
        assert usage.cached_tokens <= request.images[0].position


def test_frames_given_one_by_one_are_a_video(engine_of):
    urls = [pictures.data_url(pictures.encoded(frame)) for frame in clips.greys(5)]
    with engine_of() as engine:
        request = prepared(engine, frames_part(urls, index=1, param="p", fps=1.0))
        text = engine.tokenizer.decode(request.prompt_ids)
    assert [f"<{s} seconds>" in text for s in ("0.5", "2.5", "4.0")] == [True] * 3
    assert len(request.images) == 3


def test_videos_that_cannot_be_used_are_named(engine_of):
    with engine_of(context=256) as engine:
        with pytest.raises(VideoInvalid, match=r"Video 2 cannot be used: .*damaged"):
            prepared(engine, video(clips.encoded(clips.greys(1, 32, 32))), video(MP4[:60], 2))
        with pytest.raises(ContextOverflow):
            prepared(engine, *[video(MP4)] * 9)
        junk = frames_part([pictures.data_url(b"junk")], index=1, param="p")
        with pytest.raises(VideoInvalid, match=r"frame 1: .*known image format"):
            prepared(engine, junk)
        large = pictures.data_url(pictures.encoded(Image.new("1", (5792, 5793))))
        many = frames_part([large] + [pictures.data_url(b"junk")] * 700, index=1, param="p")
        with pytest.raises(VideoInvalid, match=r"more than the 512 frames of 5792 x 5793"):
            prepared(engine, many)  # and no other frame was looked at


def test_a_video_in_an_earlier_message_stays(engine_of):
    first = Message(role="user", parts=(video(MP4), TextPart(text="What?")))
    with engine_of(cache="on") as engine:
        client = ChatClient(engine)
        _, usage = reply_of(
            engine, client.prepare(Conversation(messages=(first,)), OPTIONS).request
        )
        talk = (first, text_message("assistant", "Well."), text_message("user", "And?"))
        request = client.prepare(Conversation(messages=talk), OPTIONS).request
        assert len(request.images) == 2
        _, later = reply_of(engine, request)
        assert later.cached_tokens >= usage.prompt_tokens - 24
