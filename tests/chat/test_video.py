"""Videos from bytes to groups of frames: the reference's choice, size and times; bad files."""

from __future__ import annotations

import io
import random
import struct
import sys
import weakref
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    smart_resize,
)
from transformers.video_utils import VideoMetadata

import clips
import malformed
import pictures
from civetta.chat import video_decode
from civetta.chat.image_rules import ImageRules
from civetta.chat.image_source import EncodedImage
from civetta.chat.video_decode import prepare_frames, prepare_video
from civetta.chat.video_rules import BadVideo, VideoRules, video_rules_of
from civetta.chat.video_source import VideoBytes, VideoFrames, file_video, frames_part, video_part
from civetta.errors import CheckpointMalformed, VideoInvalid

IMAGE = ImageRules(patch=16, merge=2, temporal=2)
RULES = VideoRules(image=IMAGE, min_pixels=4096)


class Limits:
    """What the reference's methods read of their object."""

    fps, num_frames, min_frames, max_frames = 2, None, 4, 768


@given(total=st.integers(1, 5000), rate=st.sampled_from([1, 5, 23.976, 25, 29.97, 60]))
@settings(max_examples=200, deadline=None)
def test_frames_and_times_are_the_references(total, rate):
    found = RULES.chosen(total, rate)
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    assert found == Qwen3VLVideoProcessor.sample_frames(Limits, metadata).tolist()
    right = Qwen3VLProcessor._calculate_timestamps(None, list(found), rate)
    assert RULES.stamps([i / rate for i in found]) == pytest.approx(right)


@given(
    frames=st.integers(2, 768),
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    bounds=st.sampled_from([(131072, 786432), (4096, 25165824)]),
)
@settings(max_examples=300, deadline=None)
def test_sizes_are_the_references(frames, height, width, bounds):
    rules = VideoRules(image=IMAGE, min_pixels=bounds[0], max_pixels=bounds[1])
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(BadVideo, match="200 times"):
            rules.resized(frames, height, width)
        return
    try:
        right = smart_resize(frames, height, width, 2, 32, bounds[0], bounds[1])
    except ValueError:  # it grows small frames first, which may round a side past the ratio
        return
    assert rules.resized(frames, height, width) == right


# Files


@pytest.mark.parametrize("kind", clips.CODECS)
def test_containers_are_decoded(kind):
    found = prepare_video(clips.encoded(clips.greys(24), kind), RULES)
    chosen = RULES.chosen(24, 8)
    assert chosen == [0, 5, 9, 14, 18, 23]
    numbers = [clips.number_of(group.patches_PV[:, i * 256 : (i + 1) * 256])
               for group in found.groups for i in (0, 1)]  # fmt: skip
    assert numbers == chosen
    assert found.seconds == pytest.approx(((0 + 5) / 16, (9 + 14) / 16, (18 + 23) / 16))
    assert {(group.frames, group.grid_h, group.grid_w) for group in found.groups} == {(2, 4, 4)}
    assert found.tokens == 3 * 4


def test_frames_of_a_camera_that_writes_jpegs_are_decoded():
    colours = ("red", "navy")
    frames = [pictures.encoded(pictures.flat(64, 48, colour), "JPEG") for colour in colours]
    found = prepare_video(packed(frames), RULES)
    assert len(found.groups) == 1
    red, navy = found.groups[0].normalised(0, 1).reshape(3, 2, -1).mean(-1).T
    assert red.argmax() == 0
    assert navy.argmax() == 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_decoded(kind):
    found = prepare_video(clips.animated(clips.greys(24), kind), RULES)
    numbers = [clips.number_of(group.patches_PV[:, :256]) for group in found.groups]
    assert numbers == [0, 15]  # of 0, 8, 15, 23
    assert found.seconds == pytest.approx((0.4, 1.9))


def test_a_still_and_a_short_clip_fill_their_groups():
    still = prepare_video(pictures.encoded(pictures.flat(64, 64, "red"), "GIF"), RULES)
    assert len(still.groups) == 1
    assert still.groups[0].frames == 2
    three = prepare_video(clips.animated(clips.greys(3), "PNG"), RULES)
    last = three.groups[-1].patches_PV.reshape(-1, 3, 2, 256)
    assert (last[:, :, 0] == last[:, :, 1]).all()


def test_a_phones_upright_video_is_turned():
    frame = Image.new("RGB", (64, 32), "black")
    frame.paste("white", (0, 0, 32, 32))  # the left half: the top, once it is turned clockwise
    data = clips.encoded([frame] * 4)
    assert prepare_video(data, RULES).groups[0].grid_w == 4
    upright = prepare_video(clips.turned(data), RULES).groups[0]
    assert (upright.grid_h, upright.grid_w) == (4, 2)
    assert upright.patches_PV[:4].mean() > 200
    assert upright.patches_PV[-4:].mean() < 50


def test_many_frames_share_the_pixels():
    rules = VideoRules(image=IMAGE, max_pixels=64 * 1024)
    found = prepare_frames(clips.greys(30, 256, 256), [i / 2 for i in range(30)], rules)
    assert len(found.groups) == 15
    assert sum(group.tokens for group in found.groups) * 2 <= 64


MP4 = clips.encoded([pictures.noise(64, 48, i) for i in range(12)])
WEBM = clips.encoded([pictures.noise(64, 48, i) for i in range(12)], "webm")
AVI = clips.encoded([pictures.noise(64, 48, i) for i in range(12)], "avi")
GIF = clips.animated([pictures.noise(64, 48, i) for i in range(6)])


def packed(frames, codec="mjpeg"):
    """An AVI of frames of 64 x 48 that are encoded already."""
    out = io.BytesIO()
    with av.open(out, "w", format="avi") as container:
        stream = container.add_stream(codec, rate=2)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        if codec == "rawvideo":
            stream.pix_fmt = "yuv420p"
        for number, frame in enumerate(frames):
            packet = av.Packet(frame)
            packet.stream, packet.pts, packet.dts = stream, number, number
            packet.time_base = Fraction(1, 2)
            container.mux(packet)
    return out.getvalue()


def grown(gif: bytes, side: int) -> bytes:
    """The animation with a last frame of so many pixels a side, whatever its data holds."""
    sizes = struct.pack("<HH", 64, 48)
    place = gif.rindex(b",\0\0\0\0" + sizes) + 5
    return gif[:place] + struct.pack("<HH", side, side) + gif[place + 4 :]


PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
MALFORMED = {
    "empty": (b"", "empty"),
    "text": (b"hello", "no known video format"),
    "playlist": (PLAYLIST, "no known video format"),
    "picture": (pictures.encoded(pictures.flat(9, 9, "red"), "JPEG"), "no known video format"),
    "mp4 head": (MP4[:40], "damaged or incomplete"),
    "mp4 cut": (MP4[: len(MP4) // 2], "damaged or incomplete"),
    "webm head": (WEBM[:60], "damaged or incomplete|no picture|no frames"),
    "avi head": (AVI[:300], "damaged or incomplete|no picture|no frames"),
    "gif cut": (GIF[: len(GIF) // 2], "damaged or incomplete"),
    "no kind of mp4": (b"\0\0\0\x18ftypisom" + b"\0" * 200, "damaged or incomplete|no picture"),
    "bomb by header": (malformed.MALFORMED["bomb by header"][0], "33554432 pixels"),
    "gif bomb": (malformed.MALFORMED["gif bomb"][0], "33554432 pixels"),
    "gif that grows to a bomb": (grown(GIF, 0xFFFF), "33554432 pixels"),
    "gif that grows": (grown(GIF, 6000), "6000 x 6000 pixels, and 33554432"),
    "a frame of many scans": (packed([malformed.many_scans(100)] * 2), "more than 100 scans"),
    "pictures of a rare kind": (
        packed([bytes(64 * 48 * 3 // 2)], "rawvideo"),
        "are rawvideo; H.264",
    ),
    "strip": (clips.animated(clips.greys(2, 2010, 10)), "200 times"),
    "a playlist that calls itself mp4": (b"\0\0\0\x08ftyp" + PLAYLIST, "damaged|no picture"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_videos_are_refused_with_a_reason(name):
    data, words = MALFORMED[name]
    with pytest.raises(BadVideo, match=words):
        prepare_video(data, RULES)


def test_bounds_are_kept(monkeypatch):
    monkeypatch.setattr(video_decode, "MAX_VIDEO_FRAMES", 10)
    for data in (MP4, WEBM, clips.animated(clips.greys(12))):
        with pytest.raises(BadVideo, match="more than the 10 frames of 64 x 48"):
            prepare_video(data, RULES)
    monkeypatch.setattr(video_decode, "MAX_DECODED_PIXELS", 100)
    with pytest.raises(BadVideo, match="64 x 48 pixels, and 100"):
        prepare_video(MP4, RULES)
    monkeypatch.setattr(video_decode, "MAX_VIDEO_BYTES", 100)
    with pytest.raises(BadVideo, match="100 are the limit"):
        prepare_video(MP4, RULES)


@pytest.mark.filterwarnings("ignore")
def test_damaged_videos_do_not_crash():
    rng, refused, longest = random.Random(3), 0, 0
    for number in range(200):
        data = bytearray((MP4, WEBM, AVI, GIF)[number % 4])
        for _ in range(rng.choice((1, 4, 30))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            found = prepare_video(bytes(data), RULES)
        except BadVideo as error:
            refused += 1
            longest = max(longest, len(str(error)))
        else:
            assert 1 <= len(found.groups) <= 400
    assert longest < 300
    assert 10 < refused < 200


def test_without_pyav_the_error_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(BadVideo, match=r"civetta\[video\]"):
        prepare_video(MP4, RULES)
    assert prepare_video(GIF, RULES).groups  # animations need Pillow alone


def test_frames_of_different_sizes_and_too_many_are_refused():
    with pytest.raises(BadVideo, match="frame 2 has 32 x 32 pixels, the first one 64 x 48"):
        prepare_frames([*clips.greys(1), *clips.greys(1, 32, 32)], [0, 1], RULES)
    with pytest.raises(BadVideo, match="4 frames, and 3 are the limit"):
        prepare_frames(clips.greys(4), range(4), VideoRules(image=IMAGE, max_frames=3))
    with pytest.raises(BadVideo, match="no frames"):
        prepare_frames([], [], RULES)


def test_of_frames_the_resized_form_alone_is_held():
    made = []

    def frames():
        for _ in range(6):
            frame = Image.new("RGB", (640, 480))
            made.append(weakref.ref(frame))
            yield frame
            del frame
            assert sum(one() is not None for one in made) <= 1

    rules = VideoRules(image=IMAGE, min_pixels=4096, max_pixels=64 << 10)
    assert len(prepare_frames(frames(), range(6), rules).groups) == 3
    assert len(made) == 6


def test_frames_have_a_limit_together(monkeypatch):
    """What they are is known from the first: no other one is taken."""
    monkeypatch.setattr(video_decode, "MAX_VIDEO_PIXELS", 3 * 64 * 48)
    frames = iter(clips.greys(4))
    with pytest.raises(BadVideo, match="more than the 3 frames of 64 x 48"):
        prepare_frames(frames, range(4), RULES)
    assert len(list(frames)) == 3


def test_frames_that_are_larger_than_the_head_says_have_that_limit_too(monkeypatch):
    monkeypatch.setattr(video_decode, "_check_size", lambda *_: None)
    monkeypatch.setattr(video_decode, "MAX_VIDEO_PIXELS", 5 * 64 * 48)
    with pytest.raises(BadVideo, match="pixels together"):
        prepare_video(MP4, RULES)


# Sources and settings


def test_requests_bring_videos_in_three_forms(tmp_path):
    part = video_part(pictures.data_url(MP4, "video/mp4"), index=1, param="p")
    assert part.payload == VideoBytes(index=1, data=MP4, param="p")
    jpegs = [pictures.encoded(frame, "JPEG") for frame in clips.greys(3)]
    bodies = [pictures.data_url(data, "x").partition(",")[2] for data in jpegs]
    joined = video_part("data:video/jpeg;base64," + ",".join(bodies), index=2, param="p", fps=4)
    urls = [pictures.data_url(data, "image/jpeg") for data in jpegs]
    listed = frames_part(urls, index=2, param="p", fps=4)
    right = tuple(EncodedImage(data=data, declared="JPEG") for data in jpegs)
    assert joined.payload == listed.payload == VideoFrames(index=2, frames=right, fps=4, param="p")
    assert joined.digest == listed.digest != part.digest
    for number, data in enumerate(jpegs):
        (tmp_path / f"{number}.jpg").write_bytes(data)
    assert [frame.data for frame in file_video(tmp_path, index=1).payload.frames] == jpegs


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/x.mp4", "no data URL of a video"),
        ("data:image/png;base64,AAAA", "no data URL of a video"),
        ("data:video/mp4,AAAA", "no data URL of a video"),
        ("data:video/mp4;base64,A*A", "base64"),
        ("data:video/jpeg;base64,AAAA,%", "frame 2"),
    ],
)
def test_bad_urls_are_refused(url, words):
    with pytest.raises(VideoInvalid, match=f"Video 3 .*{words}"):
        video_part(url, index=3, param="p")


def test_a_rate_belongs_to_frames():
    with pytest.raises(VideoInvalid, match="has its own"):
        video_part(pictures.data_url(MP4, "video/mp4"), index=1, param="p", fps=2)
    with pytest.raises(VideoInvalid, match="fps is 0"):
        frames_part([], index=1, param="p", fps=0)
    with pytest.raises(VideoInvalid, match="cannot be read"):
        file_video(Path("/nowhere.mp4"), index=1)


def test_rules_come_from_the_preprocessor_file():
    own = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 1, "max_frames": 8}
    rules = video_rules_of(own, IMAGE, "x")
    assert (rules.min_pixels, rules.max_pixels, rules.fps, rules.max_frames) == (
        4096,
        25165824,
        1,
        8,
    )
    assert rules.image == IMAGE
    assert video_rules_of(None, IMAGE, "x") == VideoRules(image=IMAGE)
    for bad in ({"fps": -1}, {"min_frames": 9, "max_frames": 3}, {"patch_size": 14}):
        with pytest.raises(CheckpointMalformed):
            video_rules_of(bad, IMAGE, "x")


def test_pixels_are_what_frames_show():
    frames = [np.asarray(frame) for frame in clips.greys(2)]
    found = prepare_frames(clips.greys(2), [0, 1], RULES)
    patch = found.groups[0].patches_PV[0].reshape(3, 2, 16, 16)
    assert (patch[:, 0] == frames[0][0, 0, 0]).all()
    assert (patch[:, 1] == frames[1][0, 0, 0]).all()
