"""Kept states and images: reuse up to the first picture that differs, and never beyond it."""

from __future__ import annotations

import threading

import pytest

import pictures
import tiny_vision
from civetta.cache.protocol import MissReason, Tier
from civetta.chat.image_source import bytes_part
from civetta.chat.message import Conversation, Message, TextPart, text_message
from civetta.engine.client import ChatClient, ReplyOptions
from civetta.engine.load import load_engine
from civetta.engine.loop import StepLoop
from civetta.engine.protocol import Finished, TokenEvent
from civetta.options import CacheOptions, EngineOptions, ModelOptions, Settings
from civetta.types import SamplingOverrides

pytestmark = pytest.mark.timeout(120)
RED, BLUE, GREEN = (
    pictures.encoded(pictures.flat(96, 64, colour)) for colour in ("red", "blue", "green")
)
OPTIONS = ReplyOptions(sampling=SamplingOverrides(temperature=1.0, seed=5), max_tokens=8)
LONG = "Once upon a time there was a picture. " * 4


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    path = str(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))

    def load(sessions=1, **cache):
        return load_engine(
            Settings(
                model=ModelOptions(model=path, threads=1),
                engine=EngineOptions(sessions=sessions),
                cache=CacheOptions(**{"cache_ram_bytes": 1 << 26, **cache}),
            )
        )

    return load


def user(*parts):
    """A user message of texts and encoded images."""
    made = [
        TextPart(text=part) if isinstance(part, str) else bytes_part(part, index=1)
        for part in parts
    ]
    return Message(role="user", parts=tuple(made))


def prepared(engine, *messages):
    return ChatClient(engine).prepare(Conversation(messages=messages), OPTIONS).request


def reply_of(engine, request):
    events = list(engine.submit(request))
    assert isinstance(events[-1], Finished)
    ids = [(event.token_id, event.logprob) for event in events if isinstance(event, TokenEvent)]
    return ids, events[-1].usage


def ask(engine, *messages):
    return reply_of(engine, prepared(engine, *messages))


@pytest.fixture(scope="module")
def cold(engine_of):
    """What an engine without a cache says."""
    with engine_of(cache="off") as engine:
        yield lambda *messages: ask(engine, *messages)[0]


def test_a_further_image_keeps_the_earlier_reuse(engine_of, cold):
    first = user(LONG, RED, "What is it?")
    second = [first, text_message("assistant", "Red."), user("And ", BLUE, "?")]
    third = [*second, text_message("assistant", "Blue."), user(GREEN)]
    with engine_of() as engine:
        prompt = prepared(engine, first).prompt_ids
        ask(engine, first)
        for messages in (second, third):
            ids = prepared(engine, *messages).prompt_ids
            shared = sum(1 for _ in common(prompt, ids))
            found, usage = ask(engine, *messages)
            assert found == cold(*messages)
            assert usage.cached_tokens >= shared - 1
            prompt = ids


def common(first, second):
    """Tokens that both begin with."""
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one


@pytest.mark.parametrize("changed", [0, 1])
def test_a_changed_image_ends_the_reuse_there(engine_of, cold, changed):
    def talk(images):
        return user(LONG, images[0], LONG, images[1], LONG)

    images = [RED, BLUE]
    with engine_of() as engine:
        request = prepared(engine, talk(images))
        places = [image.position for image in request.images]
        reply_of(engine, request)
        images[changed] = GREEN
        found, usage = ask(engine, talk(images))
        assert found == cold(talk(images))
        assert usage.cached_tokens <= places[changed]
        assert usage.cache.miss is MissReason.NO_POINT
        # The place where prompts part is kept now: a third picture gets all that can be reused.
        images[changed] = pictures.encoded(pictures.flat(96, 64, "white"))
        found, usage = ask(engine, talk(images))
        assert found == cold(talk(images))
        assert usage.cached_tokens == places[changed]
        assert usage.cache.miss is MissReason.IMAGES
        assert usage.cache.miss_token == places[changed]


def test_a_changed_image_leaves_earlier_messages(engine_of, cold):
    before = [user(LONG, RED), text_message("assistant", "A red one. " * 12)]
    with engine_of() as engine:
        prompts = [prepared(engine, *before, user(text)).prompt_ids for text in "xy"]
        start = sum(1 for _ in common(*prompts)) - len("<|im_start|>user\n")  # tokens or fewer
        ask(engine, *before, user(BLUE, LONG))
        found, usage = ask(engine, *before, user(GREEN, LONG))
        assert found == cold(*before, user(GREEN, LONG))
        assert usage.cached_tokens >= start


def test_the_same_question_with_another_picture_after_a_hit(engine_of, cold):
    with engine_of() as engine:
        ask(engine, user(LONG, RED, "Colour?"))
        red, usage = ask(engine, user(LONG, RED, "Colour?"))
        assert usage.cached_tokens == usage.prompt_tokens - 1
        blue, usage = ask(engine, user(LONG, BLUE, "Colour?"))
        assert usage.cached_tokens < usage.prompt_tokens - 8
        assert blue == cold(user(LONG, BLUE, "Colour?"))
        assert blue != red
        again, usage = ask(engine, user(LONG, RED, "Colour?"))
        assert (again, usage.cached_tokens) == (red, usage.prompt_tokens - 1)


def test_text_that_spells_the_placeholders_is_no_picture(engine_of):
    """Prompts of the same ids, one with a picture: neither uses the other's state."""
    with engine_of() as engine:
        with_picture = prepared(engine, user(LONG, RED))
        ids = with_picture.prompt_ids
        _, usage = reply_of(engine, with_picture)
        assert usage.cached_tokens == 0
        bare = type(with_picture)(request_id="bare", prompt_ids=ids, max_tokens=4)
        _, usage = reply_of(engine, bare)
        assert usage.cached_tokens <= with_picture.images[0].position
        _, usage = reply_of(engine, bare)
        assert usage.cached_tokens == len(ids) - 1
        _, usage = reply_of(engine, with_picture)
        assert usage.cached_tokens == len(ids) - 1


def test_a_restart_knows_the_pictures(engine_of, cold, tmp_path):
    first = user(LONG, RED, LONG, BLUE, "What?")
    with engine_of(cache_disk=str(tmp_path)) as engine:
        ask(engine, first)
        second_place = prepared(engine, first).images[1].position
    second = [first, text_message("assistant", "Well."), user(GREEN, "Now?")]
    other = user(LONG, RED, LONG, GREEN, "What?")
    with engine_of(cache_disk=str(tmp_path)) as engine:
        found, usage = ask(engine, *second)
        assert found == cold(*second)
        assert usage.cache.source is Tier.DISK
        assert usage.cached_tokens > second_place
        found, usage = ask(engine, other)
        assert found == cold(other)
        assert usage.cached_tokens <= second_place
        found, usage = ask(engine, user(LONG, RED, LONG, RED, "What?"))
        assert usage.cached_tokens == second_place
    with engine_of(cache_disk=str(tmp_path)) as engine:  # a third start: nothing was mixed up
        found, usage = ask(engine, first)
        assert found == cold(first)
        assert usage.cached_tokens == usage.prompt_tokens - 1


@pytest.fixture
def first_step(monkeypatch):
    """Set it, and engines made by this test begin to step: till then all that is asked waits."""
    run, allowed = StepLoop.run, threading.Event()

    def run_when_allowed(loop):
        allowed.wait()
        run(loop)

    monkeypatch.setattr(StepLoop, "run", run_when_allowed)
    yield allowed
    allowed.set()


def test_waiting_requests_share_up_to_the_first_different_picture(engine_of, cold, first_step):
    asked = [user(LONG * 8, data, "?") for data in (RED, BLUE, RED, GREEN)]
    expected = [cold(message) for message in asked]
    with engine_of(sessions=4) as engine:
        streams = [engine.submit(prepared(engine, message)) for message in asked]
        first_step.set()
        found = []
        for stream in streams:
            events = list(stream)
            ids = [(e.token_id, e.logprob) for e in events if isinstance(e, TokenEvent)]
            found.append((ids, events[-1].usage))
    assert [ids for ids, _ in found] == expected
    assert sum(usage.cached_tokens > 0 for _, usage in found) == 3
