"""Where a video of a conversation comes from: an encoded file, or frames chosen by its sender."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from civetta.chat.image_rules import BadImage
from civetta.chat.image_source import EncodedImage, read_data_url
from civetta.chat.message import VideoPart
from civetta.chat.video_rules import FPS
from civetta.errors import VideoInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FRAME_LIST = "data:video/jpeg;base64,"
"""A data URL that holds JPEG frames, separated by commas, as clients of other servers send them."""

MAX_FPS = 240.0
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoBytes:
    """An encoded video; number `index` of its request, from 1."""

    index: int
    data: bytes = field(repr=False)
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFrames:
    """Encoded frames, `fps` of them a second."""

    index: int
    frames: tuple[EncodedImage, ...] = field(repr=False)
    fps: float = FPS
    param: str | None = None


def video_part(url: str, *, index: int, param: str, fps: float | None = None) -> VideoPart:
    """The part for a data URL of a video, or of JPEG frames. Raises VideoInvalid.

    `fps` is the rate of frames; an encoded video has its own.
    """
    if url[: len(FRAME_LIST)].lower() == FRAME_LIST:
        frames = url[len(FRAME_LIST) :].split(",")
        urls = ["data:image/jpeg;base64," + frame for frame in frames]
        return frames_part(urls, index=index, param=param, fps=fps)
    if fps is not None:
        raise VideoInvalid(
            "fps is for a list of frames, an encoded video has its own", index=index, param=param
        )
    head, comma, body = url.partition(",")
    form = head.lower().split(";")
    if not comma or not form[0].startswith("data:video/") or form[-1].strip() != "base64":
        shown = url[:_SHOWN_CHARS]
        raise VideoInvalid(
            f"{shown!r} is no data URL of a video (data:video/mp4;base64,...); addresses are not"
            " fetched",
            index=index,
            param=param,
        )
    try:
        data = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise VideoInvalid("its base64 is broken", index=index, param=param) from error
    return _part(data, VideoBytes(index=index, data=data, param=param))


def frames_part(
    urls: Sequence[str], *, index: int, param: str, fps: float | None = None
) -> VideoPart:
    """The part for frames as data URLs of images. Raises VideoInvalid, naming the frame."""
    rate = FPS if fps is None else fps
    if not 0 < rate <= MAX_FPS:
        raise VideoInvalid(f"fps is {rate:g}, but goes from above 0 to {MAX_FPS:g}", index=index,
                           param=param)  # fmt: skip
    frames = []
    for number, url in enumerate(urls, 1):
        try:
            frames.append(read_data_url(url))
        except BadImage as error:
            raise VideoInvalid(f"frame {number}: {error}", index=index, param=param) from error
    return _frames(frames, index=index, param=param, fps=rate)


def stored_video(data: bytes | Sequence[bytes], *, index: int, fps: float = FPS) -> VideoPart:
    """The part for an encoded video, or for encoded frames, that are here already."""
    if isinstance(data, bytes):
        return _part(data, VideoBytes(index=index, data=data))
    frames = [EncodedImage(data=frame) for frame in data]
    return _frames(frames, index=index, param=None, fps=fps)


def file_video(path: Path, *, index: int) -> VideoPart:
    """The part for a file, or for a folder whose files, by name, are frames at two a second.

    Raises VideoInvalid when something cannot be read.
    """
    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file())
            return stored_video([file.read_bytes() for file in files], index=index)
        data = path.read_bytes()
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror})"
        raise VideoInvalid(reason, index=index) from error
    return stored_video(data, index=index)


def _frames(
    frames: Sequence[EncodedImage], *, index: int, param: str | None, fps: float
) -> VideoPart:
    identity = b"".join(hashlib.sha256(frame.data).digest() for frame in frames)
    source = VideoFrames(index=index, frames=tuple(frames), fps=fps, param=param)
    return _part(identity + str(fps).encode(), source)


def _part(identity: bytes, source: VideoBytes | VideoFrames) -> VideoPart:
    return VideoPart(digest=hashlib.sha256(identity).hexdigest(), payload=source)
