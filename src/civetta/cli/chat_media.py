"""Pictures and videos of `civetta chat`: those waiting for the next message, and how /save has them.

In a message pictures come first, then videos, each kind in the order in which it was named.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from civetta.chat.image_rules import BadImage
from civetta.chat.image_source import ImageBytes, bytes_part, file_part
from civetta.chat.video_rules import BadVideo
from civetta.chat.video_source import VideoBytes, VideoFrames, file_video, stored_video
from civetta.errors import ImageInvalid, VideoInvalid

if TYPE_CHECKING:
    from civetta.chat.message import ImagePart, Message, VideoPart


@dataclass(slots=True, kw_only=True)
class PendingMedia:
    """What was named so far for the message to come; `images_before` and `videos_before` are sent."""

    images_before: int = 0
    videos_before: int = 0
    images: list[ImagePart] = field(default_factory=list)
    videos: list[VideoPart] = field(default_factory=list)

    def add_image(self, name: str) -> None:
        """Read a file and see that it is a picture; raises ImageInvalid."""
        from civetta.chat.images import decode_image  # brings numpy and PIL

        index = self.images_before + len(self.images) + 1
        part = file_part(Path(name).expanduser(), index=index)
        try:
            decode_image(_data(part))
        except BadImage as error:
            raise ImageInvalid(f"{name}: {error}", index=index) from error
        self.images.append(part)

    def add_video(self, name: str) -> None:
        """Read a video, or a folder of frames at two a second; raises VideoInvalid.

        Of an encoded video only the beginning is looked at: the rest is decoded once, when it is
        asked about.
        """
        index = self.videos_before + len(self.videos) + 1
        part = file_video(Path(name).expanduser(), index=index)
        try:
            _look_at(part)
        except BadVideo as error:
            raise VideoInvalid(f"{name}: {error}", index=index) from error
        self.videos.append(part)

    def take(self) -> tuple[ImagePart | VideoPart, ...]:
        """All of them, which are sent now."""
        taken: tuple[ImagePart | VideoPart, ...] = (*self.images, *self.videos)
        self.images_before += len(self.images)
        self.videos_before += len(self.videos)
        self.images, self.videos = [], []
        return taken

    def restart(self, images_before: int = 0, videos_before: int = 0) -> None:
        """Another conversation, which has so many of each, goes on; none wait."""
        self.images_before, self.videos_before = images_before, videos_before
        self.images, self.videos = [], []


def saved(message: Message) -> dict[str, Any]:
    """A message's pictures and videos as JSON values; keys are there for what it has alone."""
    images = [_text(_data(part)) for part in message.images]
    videos = [_saved_video(part) for part in message.videos]
    return ({"images": images} if images else {}) | ({"videos": videos} if videos else {})


def restored(
    item: dict[str, Any], first_image: int, first_video: int
) -> tuple[ImagePart | VideoPart, ...]:
    """What `saved` wrote, numbered from there on. Raises ValueError, TypeError or KeyError."""
    images, videos = item.get("images", []), item.get("videos", [])
    if not isinstance(images, list) or not isinstance(videos, list):
        raise TypeError
    pictures = [bytes_part(_bytes(text), index=i) for i, text in enumerate(images, first_image)]
    return (*pictures, *(_restored_video(video, i) for i, video in enumerate(videos, first_video)))


def _saved_video(part: VideoPart) -> dict[str, Any]:
    source = part.payload
    if isinstance(source, VideoBytes):
        return {"data": _text(source.data)}
    assert isinstance(source, VideoFrames), "made by video_source"
    return {"frames": [_text(frame.data) for frame in source.frames], "fps": source.fps}


def _restored_video(video: dict[str, Any], index: int) -> VideoPart:
    if "data" in video:
        return stored_video(_bytes(video["data"]), index=index)
    frames, fps = video["frames"], video["fps"]
    if not isinstance(frames, list) or not isinstance(fps, float):
        raise TypeError
    return stored_video([_bytes(frame) for frame in frames], index=index, fps=fps)


def _look_at(part: VideoPart) -> None:
    """See that it is a video, or that all its frames are pictures. Raises BadVideo."""
    from civetta.chat.images import decode_image
    from civetta.chat.video_decode import video_kind

    source = part.payload
    if isinstance(source, VideoBytes):
        video_kind(source.data)
        return
    assert isinstance(source, VideoFrames), "made by video_source"
    if not source.frames:
        raise BadVideo("it has no frames")
    for number, frame in enumerate(source.frames, 1):
        try:
            decode_image(frame.data)
        except BadImage as error:
            raise BadVideo(f"frame {number}: {error}") from error


def _data(part: ImagePart) -> bytes:
    source = part.payload
    assert isinstance(source, ImageBytes), "pictures of the terminal come from files"
    return source.image.data


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
