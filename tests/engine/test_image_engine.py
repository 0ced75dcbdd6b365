"""Images through the engine: what a reply may not depend on, and how others fare meanwhile."""

from __future__ import annotations

import pytest
import torch

import pictures
import tiny_vision
from civetta.chat.image_source import bytes_part, image_part
from civetta.chat.message import Conversation, ImagePart, Message, TextPart, text_message
from civetta.engine.client import ChatClient, ReplyDelta, ReplyOptions
from civetta.engine.image_rows import ImageRowsCache
from civetta.engine.load import load_engine
from civetta.engine.protocol import GenerateRequest, RequestImage, TokenEvent
from civetta.errors import (
    CheckpointError,
    ContextOverflow,
    ImageInvalid,
    RequestFailed,
    RequestInvalid,
    TemplateError,
    TokenizerError,
    UsageError,
)
from civetta.model import vision_build
from civetta.model.vision import ImageEncoding
from civetta.model.vision_build import LazyTower
from civetta.options import CacheOptions, EngineOptions, ModelOptions, Settings, VisionOptions
from civetta.types import SamplingOverrides

pytestmark = pytest.mark.timeout(120)
SEEDED = SamplingOverrides(temperature=1.0, seed=5)
RED, BLUE = (pictures.encoded(pictures.flat(96, 64, colour)) for colour in ("red", "blue"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))


def engine_at(model, *, vision=None, cache="on", **options):
    return load_engine(
        Settings(
            model=ModelOptions(model=model, threads=1),
            engine=EngineOptions(**options),
            vision=vision or VisionOptions(),
            cache=CacheOptions(cache=cache),
        )
    )


def talk(*parts):
    """One user message of texts and encoded images."""
    made, index = [], 0
    for part in parts:
        if isinstance(part, str):
            made.append(TextPart(text=part))
        else:
            index += 1
            made.append(bytes_part(part, index=index))
    return Conversation(messages=(Message(role="user", parts=tuple(made)),))


def options(**more):
    return ReplyOptions(sampling=SEEDED, logprobs=3, max_tokens=12, **more)


def ids_of(engine, conversation, **more):
    stream = ChatClient(engine).generate_sync(conversation, options(**more))
    found = [
        item.logprob for item in stream if isinstance(item, ReplyDelta) and item.logprob is not None
    ]
    return [(item.token_id, item.logprob) for item in found]


QUESTION = ("What is ", RED, " and then ", BLUE, "? Say it.")


def test_neither_chunk_nor_company_changes_a_reply(model):
    with engine_at(model) as engine:
        alone = ids_of(engine, talk(*QUESTION))
    assert len(alone) == 12
    for batch in (1, 64):
        with engine_at(model, prefill_batch=batch) as engine:
            assert ids_of(engine, talk(*QUESTION)) == alone
    with engine_at(model, sessions=3, prefill_batch=16, prefill_chunk=8) as engine:
        client = ChatClient(engine)
        asked = [talk("Hello " * 20), talk(*QUESTION), talk(BLUE, "x"), talk(*QUESTION)]
        streams = [client.generate_sync(item, options()) for item in asked]
        replies = []
        for stream in streams:
            found = [i.logprob for i in stream if isinstance(i, ReplyDelta) and i.logprob]
            replies.append([(i.token_id, i.logprob) for i in found])
    assert replies[1] == replies[3] == alone


def test_the_picture_and_its_place_matter(model):
    with engine_at(model) as engine:
        first = ids_of(engine, talk("Look: ", RED, " now"))
        assert ids_of(engine, talk("Look: ", RED, " now")) == first
        assert ids_of(engine, talk("Look: ", BLUE, " now")) != first
        assert ids_of(engine, talk(RED, "Look:  now")) != first
        assert ids_of(engine, talk("Look:  now")) != first


def test_a_text_reply_is_the_same_before_and_after_images(model):
    with engine_at(model) as engine:
        before = ids_of(engine, talk("Tell me more " * 20))
        ids_of(engine, talk(*QUESTION))
        assert ids_of(engine, talk("Tell me more " * 20)) == before


def test_a_prompt_holds_its_images(model):
    with engine_at(model) as engine:
        request = ChatClient(engine).prepare(talk(*QUESTION)).request
        token = engine.info.images.token_id
    assert [item.image.tokens for item in request.images] == [6, 6]
    for item in request.images:
        ids = request.prompt_ids[item.position - 1 : item.position + item.image.tokens + 1]
        assert set(ids[1:-1]) == {token}
        assert token not in (ids[0], ids[-1])
    assert request.images[0].image.digest != request.images[1].image.digest


def test_users_cannot_write_a_placeholder(model):
    with engine_at(model) as engine:
        request = ChatClient(engine).prepare(talk("<|image_pad|>", RED)).request
        assert len(request.images) == 1
        assert request.prompt_ids.count(engine.info.images.token_id) == 6


@pytest.fixture
def watched(monkeypatch):
    """What the step thread does, in order: an image's step, or a launch of so many rows."""
    log = []
    advance = ImageEncoding.advance

    def step(self):
        log.append("image")
        return advance(self)

    monkeypatch.setattr(ImageEncoding, "advance", step)

    def watch(engine):
        launch = engine._loop._model.forward_pieces

        def forward(pieces):
            log.append([len(piece.ids) for piece in pieces])
            return launch(pieces)

        monkeypatch.setattr(engine._loop._model, "forward_pieces", forward)
        return log

    return watch


def test_others_decode_between_the_steps_of_an_image(model, watched):
    large = pictures.encoded(pictures.noise(1024, 512))
    with engine_at(model, sessions=2) as engine:
        log = watched(engine)
        client = ChatClient(engine)
        first = client.generate_sync(talk("Hi"), ReplyOptions(sampling=SEEDED, max_tokens=200))
        events = iter(first)
        while not isinstance(next(events), ReplyDelta):
            pass
        client.generate_sync(talk(large), options()).result_sync()
        for _ in events:
            pass
    steps = [i for i, what in enumerate(log) if what == "image"]
    assert len(steps) > 10
    beside = [i for i in steps if i < max(j for j, what in enumerate(log) if what == [1])]
    assert beside == steps, "the other reply went on throughout"
    assert all(log[i - 1] == [1] for i in steps), "a token between any two steps"


def test_an_image_is_encoded_once(model, watched):
    with engine_at(model) as engine:
        log = watched(engine)
        first = ids_of(engine, talk(RED, "What?"))
        assert log.count("image") > 0
        del log[:]
        assert ids_of(engine, talk(RED, "What?")) == first
        assert log.count("image") == 0
        ids_of(engine, talk(BLUE, "What?"))
        assert log.count("image") > 0
    with engine_at(model, vision=VisionOptions(image_cache_mib=0), cache="off") as engine:
        log = watched(engine)
        for _ in range(2):
            del log[:]
            assert ids_of(engine, talk(RED, "What?")) == first
            assert log.count("image") > 0


def test_the_towers_weights_are_bound_with_the_first_image(model, monkeypatch):
    bound, build = [], vision_build.build_tower

    def counted(*args, **more):
        bound.append(build(*args, **more))
        return bound[-1]

    monkeypatch.setattr(vision_build, "build_tower", counted)
    with engine_at(model) as engine:
        ids_of(engine, talk("What?"))
        assert not bound
        for picture in (RED, BLUE):
            ids_of(engine, talk(picture, "What?"))
            assert len(bound) == 1


def test_a_request_called_off_leaves_no_image_behind(model):
    large = pictures.encoded(pictures.noise(1024, 1024))
    with engine_at(model) as engine:
        stream = ChatClient(engine).generate_sync(talk(large), options())
        stream.cancel()
        for _ in stream:
            pass
        ids_of(engine, talk("x"))
        assert engine._loop._images._under_way is None
        engine._loop.check()


def test_a_fault_in_the_tower_ends_its_request_alone(model, monkeypatch):
    with engine_at(model, sessions=2) as engine:
        client = ChatClient(engine)
        other = client.generate_sync(talk("Hi"), ReplyOptions(sampling=SEEDED, max_tokens=60))

        def fail(self, image):
            raise RuntimeError("broken")

        monkeypatch.setattr(LazyTower, "begin", fail)
        with pytest.raises(RequestFailed):
            client.generate_sync(talk(RED), options()).result_sync()
        monkeypatch.undo()
        assert other.result_sync().usage.completion_tokens > 0
        assert ids_of(engine, talk(RED, "What?"))


def test_several_large_images_of_several_users_take_turns(model):
    large = [pictures.encoded(pictures.noise(640, 480, seed)) for seed in range(3)]
    with engine_at(model) as engine:
        alone = [ids_of(engine, talk(data, "?")) for data in large]
    with engine_at(model, sessions=3) as engine:
        client = ChatClient(engine)
        streams = [client.generate_sync(talk(data, "?"), options()) for data in large]
        for stream, wanted in zip(streams, alone, strict=True):
            found = [i.logprob for i in stream if isinstance(i, ReplyDelta) and i.logprob]
            assert [(i.token_id, i.logprob) for i in found] == wanted
        engine._loop.check()


# Refusals


def test_images_that_cannot_be_used_are_named(model):
    with engine_at(model) as engine:
        client = ChatClient(engine)
        with pytest.raises(ImageInvalid, match=r"Image 2 cannot be used: .*no known image format"):
            client.prepare(talk(RED, b"junk"))
        with pytest.raises(ContextOverflow):
            client.prepare(talk(*[pictures.encoded(pictures.noise(1000, 1000))] * 40))
        spec = client.prepare(talk(RED)).request
        moved = RequestImage(position=0, image=spec.images[0].image)
        wrong = GenerateRequest(request_id="x", prompt_ids=spec.prompt_ids, images=(moved,))
        with pytest.raises(RequestInvalid, match="placeholder"):
            engine.submit(wrong)


def test_without_a_tower_images_are_refused(model):
    with engine_at(model, vision=VisionOptions(mmproj="none")) as engine:
        assert engine.info.images is None
        with pytest.raises(RequestInvalid, match="reads text only"):
            ChatClient(engine).prepare(talk(RED))


def test_a_template_that_drops_images_is_refused(model, monkeypatch):
    with engine_at(model) as engine:
        client = ChatClient(engine)
        images = talk(RED)
        monkeypatch.setattr(
            type(engine),
            "template",
            property(lambda self, real=engine.template: _Dropping(real)),
        )
        with pytest.raises(TemplateError, match="0 of the conversation's 1 images"):
            client.prepare(images)


class _Dropping:
    """A template that shows no images."""

    def __init__(self, real):
        self._real = real

    def render(self, conversation, options=None):
        return self._real.render(_text_of(conversation), options)


def _text_of(conversation):
    return Conversation(messages=(text_message("user", "no images here"),))


def test_limits_are_the_flags(model):
    noise = pictures.encoded(pictures.noise(640, 640))
    with engine_at(model, vision=VisionOptions(image_max_tokens=16)) as engine:
        assert ChatClient(engine).prepare(talk(noise)).request.images[0].image.tokens <= 16
    with engine_at(model, vision=VisionOptions(image_min_tokens=64)) as engine:
        assert ChatClient(engine).prepare(talk(RED)).request.images[0].image.tokens >= 64
    with pytest.raises(UsageError, match="--image-min-tokens"):
        engine_at(model, vision=VisionOptions(image_min_tokens=99, image_max_tokens=9))


def test_a_missing_sidecar_is_an_error(model):
    with pytest.raises(
        CheckpointError,
        match=r"nothing at /nowhere/mmproj\.gguf\. .* vision sidecar \(--mmproj\)\.$",
    ):
        engine_at(model, vision=VisionOptions(mmproj="/nowhere/mmproj.gguf"))


def test_placeholders_that_disagree_are_refused(model, tmp_path):
    other = tiny_vision.write(tmp_path / "x")
    config = (other / "config.json").read_text()
    with engine_at(model) as engine:
        right = engine.info.images.token_id
    changed = config.replace(f'"image_token_id": {right}', '"image_token_id": 5')
    assert changed != config
    (other / "config.json").write_text(changed)
    with pytest.raises(TokenizerError, match="placeholder"):
        engine_at(str(other))


# Parts


def test_image_parts_of_requests_have_an_identity():
    url = pictures.data_url(RED)
    parts = [image_part(url, index=i, param="p") for i in (1, 2)]
    assert all(isinstance(part, ImagePart) for part in parts)
    assert parts[0].digest == parts[1].digest
    assert parts[0].payload.index == 1


def test_the_rows_cache_keeps_to_its_budget():
    cache = ImageRowsCache(1000)
    rows = torch.zeros(10, 10)  # 400 bytes
    for name in (b"a", b"b"):
        cache.put(name, rows)
    assert cache.get(b"a") is rows
    cache.put(b"c", rows)
    cache.check()
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    cache.put(b"d", torch.zeros(300))
    assert cache.get(b"d") is None
    assert cache.bytes_held == 800
    cache.put(b"a", rows)
    cache.check()


def test_events_of_an_image_request_come_in_order(model):
    with engine_at(model) as engine:
        request = ChatClient(engine).prepare(talk(RED, "?"), options()).request
        events = list(engine.submit(request))
    names = [type(event).__name__ for event in events]
    assert names[0] == "Started"
    assert names[1] == "Progress"
    assert names[-1] == "Finished"
    assert sum(isinstance(event, TokenEvent) for event in events) == 12
