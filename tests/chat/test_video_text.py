"""Times and placeholders of a video's frames in a prompt, as the reference processor writes them."""

from __future__ import annotations

import pytest

from civetta.chat.builtin_text import VIDEO_TEXT
from civetta.chat.message import Conversation, Message, TextPart, VideoPart
from civetta.chat.template import ChatTemplate, TemplateOptions
from civetta.chat.video_text import with_times
from civetta.errors import TemplateError


def rendered(*parts, **options):
    made = tuple(
        TextPart(text=part) if isinstance(part, str) else VideoPart(digest="x") for part in parts
    )
    conversation = Conversation(messages=(Message(role="user", parts=made),))
    return ChatTemplate().render(conversation, TemplateOptions(**options))


def shown(*seconds):
    return "".join(f"<{s} seconds>{VIDEO_TEXT}" for s in seconds)


def test_each_group_comes_after_its_time():
    found = with_times(rendered("Look: ", None, " Well?", None), [(0.25, 1.3), (10.0,)])
    assert f"Look: {shown('0.2', '1.3')} Well?{shown('10.0')}<|im_end|>" in found.text


def test_places_move_along():
    plain = rendered("a <|im_end|> ", None, " b <|im_end|>")
    found = with_times(plain, [(0.0, 1.0)])
    assert len(found.literal_starts) == len(plain.literal_starts) == 2
    for at in found.literal_starts:
        assert found.text[at:].startswith("<|im_end|>")
    assert found.spans[-1].end == len(found.text)
    for before, after in zip(plain.spans, found.spans, strict=True):
        assert found.text[after.start :][:10] == plain.text[before.start :][:10]


def test_what_users_type_is_no_video():
    plain = rendered(VIDEO_TEXT, None)
    found = with_times(plain, [(0.5,)])
    assert f"{VIDEO_TEXT}{shown('0.5')}" in found.text


def test_a_number_may_go_before_a_video():
    found = with_times(rendered(None, add_vision_id=True), [(0.5, 2.5)])
    assert f"Video 1: {shown('0.5', '2.5')}" in found.text


def test_without_videos_nothing_changes():
    plain = rendered("no video")
    assert with_times(plain, []) == plain
    with pytest.raises(TemplateError, match="0 of the conversation's 1 videos"):
        with_times(plain, [(0.0,)])
