"""Pictures and videos of `prompt` and `chat`, on the tiny model with a tower."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

import clips
import pictures
import tiny_vision
from civetta.chat.template import TemplateOptions
from civetta.cli.chat_media import PendingMedia
from civetta.cli.chat_session import ChatSession, CommandFault
from civetta.errors import ImageInvalid, VideoInvalid

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def files(tmp_path):
    for colour in ("red", "blue"):
        (tmp_path / f"{colour}.png").write_bytes(pictures.encoded(pictures.flat(64, 64, colour)))
    (tmp_path / "text.png").write_text("no picture")
    return tmp_path


def test_prompt_shows_pictures(civetta, model, files):
    def once(*flags):
        more = ("-m", model, "-n", "8", "--seed", "3", "--json", "--think", "off")
        result = civetta("prompt", "Colour?", *more, *flags)
        assert result.status == 0, result.err
        report = json.loads(result.out)
        return report["token_sha256"], report["prompt_tokens"]

    red, blue = (("--image", str(files / f"{name}.png")) for name in ("red", "blue"))
    first = once(*red)
    assert once(*red) == first
    assert once(*blue)[0] != first[0]
    assert once(*red, *blue)[1] > first[1] > once()[1]
    assert once(*red, "--image-min-tokens", "64")[1] >= first[1] + 60
    numbered = once(*red, "--add-vision-id")  # "Picture 1: " before it
    assert first[1] < numbered[1] < first[1] + 16


def test_prompt_shows_videos(civetta, model, tmp_path):
    """A file and the same frames in a folder; then what cannot be read."""
    (tmp_path / "clip.mp4").write_bytes(clips.encoded(clips.greys(8), rate=2))
    frames = tmp_path / "frames"
    frames.mkdir()
    for number, frame in enumerate(clips.greys(8)):
        (frames / f"{number}.png").write_bytes(pictures.encoded(frame))
    reports = []
    for path in (tmp_path / "clip.mp4", frames):
        more = ("-m", model, "-n", "4", "--seed", "3", "--json", "--think", "off")
        result = civetta("prompt", "What moves?", *more, "--video", str(path))
        assert result.status == 0, result.err
        reports.append(json.loads(result.out))
    assert reports[0]["prompt_tokens"] == reports[1]["prompt_tokens"] > 4 * 32
    (tmp_path / "bad.mp4").write_text("no video")
    result = civetta("prompt", "x", "-m", model, "--video", str(tmp_path / "bad.mp4"))
    assert result.status == 2
    assert "error[invalid_video]: Video 1 cannot be used: its bytes are in no known" in result.err


def test_prompt_names_the_picture_at_fault(civetta, model, files):
    good, bad = (str(files / name) for name in ("red.png", "text.png"))
    result = civetta("prompt", "x", "-m", model, "--image", good, "--image", bad)
    assert result.status == 2
    assert "error[invalid_image]: Image 2 cannot be used" in result.err
    missing = civetta("prompt", "x", "-m", model, "--image", str(files / "no.png"))
    assert "cannot be read" in missing.err
    raw = civetta("prompt", "x", "-m", model, "--raw", "--image", good)
    assert raw.status == 2
    assert "--image needs the chat template" in raw.err


def test_chat_takes_pictures_between_messages(civetta, model, files, monkeypatch):
    lines = f"/think off\n/image {files / 'red.png'}\nColour?\nAnd now?\n/stats\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    result = civetta("chat", "-m", model, "-n", "4", "--seed", "1")
    assert result.status == 0, result.err
    assert "1 picture goes with the next message" in result.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Colour?\n"))
    more = ("--image", str(files / "blue.png"), "--think", "off")
    assert civetta("chat", "-m", model, "-n", "4", *more).status == 0


def test_a_session_keeps_saves_and_loads_pictures(files, tmp_path):
    session = ChatSession(template=TemplateOptions())
    session.take(f"/image {files / 'red.png'}")
    session.take(f"/image {files / 'blue.png'}")
    assert session.take("What?").ask
    assert [part.payload.index for part in session.messages[0].images] == [1, 2]
    session.take(f"/image {files / 'red.png'}")
    session.take("And?")
    assert session.messages[1].images[0].payload.index == 3
    session.take(f"/save {tmp_path / 'talk.json'}")
    other = ChatSession(template=TemplateOptions())
    other.take(f"/load {tmp_path / 'talk.json'}")
    assert other.messages == session.messages
    data = [part.payload.image.data for item in other.messages for part in item.images]
    assert data[0] == data[2] == (files / "red.png").read_bytes()
    assert (other.media.images_before, other.media.videos_before) == (3, 0)
    other.take("/clear")
    assert other.media == PendingMedia()


def test_a_session_refuses_what_is_no_picture(files):
    session = ChatSession(template=TemplateOptions())
    with pytest.raises(ImageInvalid, match=r"text\.png: .*no known image format"):
        session.take(f"/image {files / 'text.png'}")
    with pytest.raises(CommandFault, match="name of a file"):
        session.take("/image")
    with pytest.raises(ImageInvalid, match="cannot be read"):
        session.take("/image /nowhere.png")
    assert not session.media.images


@pytest.fixture
def videos(tmp_path):
    """A clip, the same frames in a folder, and what is no video."""
    (tmp_path / "clip.mp4").write_bytes(clips.encoded(clips.greys(8), rate=2))
    for folder in ("frames", "empty", "odd"):
        (tmp_path / folder).mkdir()
    for number, frame in enumerate(clips.greys(8)):
        (tmp_path / "frames" / f"{number}.png").write_bytes(pictures.encoded(frame))
    (tmp_path / "odd" / "a.png").write_bytes(pictures.encoded(clips.greys(1)[0]))
    (tmp_path / "odd" / "b.png").write_text("no frame")
    (tmp_path / "bad.mp4").write_text("no video")
    return tmp_path


def test_chat_takes_videos_between_messages(civetta, model, videos, monkeypatch):
    def talk(*lines, flags=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(("/think off", *lines, ""))))
        result = civetta("chat", "-m", model, "-n", "4", "--seed", "1", *flags)
        assert result.status == 0, result.err
        return result

    file, folder = videos / "clip.mp4", videos / "frames"
    asked = talk(f"/video {file}", "What moves?", "/stats")
    assert "1 video goes with the next message" in asked.err
    tokens = int(re.search(r"prompt (\d+) tokens", asked.err)[1])
    plain = talk("What moves?", "/stats")
    assert tokens > int(re.search(r"prompt (\d+) tokens", plain.err)[1]) + 4 * 32
    flagged = talk("What moves?", "/stats", flags=("--video", str(folder)))
    assert f"prompt {tokens} tokens" in flagged.err


def test_a_session_keeps_saves_and_loads_videos(files, videos, tmp_path):
    session = ChatSession(template=TemplateOptions())
    session.take(f"/video {videos / 'clip.mp4'}")
    session.take(f"/image {files / 'red.png'}")
    session.take("What?")
    session.take(f"/video {videos / 'frames'}")
    assert session.take("And?").ask
    kinds = [[type(part).__name__ for part in item.media] for item in session.messages]
    assert kinds == [["ImagePart", "VideoPart"], ["VideoPart"]]
    session.take(f"/save {tmp_path / 'talk.json'}")
    other = ChatSession(template=TemplateOptions())
    other.take(f"/load {tmp_path / 'talk.json'}")
    assert other.messages == session.messages
    clip, frames = (item.videos[0].payload for item in other.messages)
    assert (clip.index, clip.data) == (1, (videos / "clip.mp4").read_bytes())
    assert (frames.index, frames.fps, len(frames.frames)) == (2, 2.0, 8)
    assert (other.media.images_before, other.media.videos_before) == (1, 2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bad.mp4", "no known video format"),
        ("empty", "it has no frames"),
        ("odd", "frame 2: "),
        ("none.mp4", "cannot be read"),
    ],
)
def test_a_session_refuses_what_is_no_video(videos, name, says):
    session = ChatSession(template=TemplateOptions())
    with pytest.raises(VideoInvalid, match=says):
        session.take(f"/video {videos / name}")
    with pytest.raises(CommandFault, match="a folder of frames"):
        session.take("/video")
    assert not session.media.videos
