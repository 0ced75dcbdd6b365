"""Images and videos in requests, whatever the dialect: numbered in order, data URLs or, for images,
https addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.api.fields import refuse
from civetta.chat.image_source import image_part
from civetta.chat.image_url import RequestFetcher
from civetta.chat.video_source import frames_part, video_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.chat.message import ImagePart, VideoPart

DETAILS = (None, "auto", "high", "original")
_VIDEOS = frozenset({"video", "video_url", "input_video"})
_VIDEO_CURE = (
    "this API has no parts for videos; ask /v1/chat/completions with a video_url part, or send some"
    " of the frames as images"
)


def refuse_video(kind: object, param: str) -> None:
    """Refuse a part of an API that knows no videos; raises RequestInvalid with the cure."""
    if isinstance(kind, str) and kind in _VIDEOS:
        refuse(param, _VIDEO_CURE)


class ImageParts:
    """Turns the images and videos of one request into parts; each gets the next number."""

    def __init__(self, *, allow_urls: bool) -> None:
        self._fetch = RequestFetcher().fetch if allow_urls else None
        self._count = 0
        self._videos = 0

    def take(self, url: str, param: str, *, detail: str | None = None) -> ImagePart:
        """The part for the next image, found at `param`.

        Raises ImageInvalid, and RequestInvalid for a detail other than full resolution.
        """
        self._count += 1
        if detail not in DETAILS:
            refuse(
                param.removesuffix("url") + "detail",
                "images are read at full resolution, so only auto and high are accepted; send a"
                " smaller picture, or start the server with --image-max-tokens",
            )
        return image_part(url, index=self._count, param=param, fetch=self._fetch)

    def take_video(self, url: str, param: str, *, fps: float | None = None) -> VideoPart:
        """The part for the next video, a data URL found at `param`. Raises VideoInvalid."""
        self._videos += 1
        return video_part(url, index=self._videos, param=param, fps=fps)

    def take_frames(self, urls: Sequence[str], param: str, *, fps: float | None) -> VideoPart:
        """The part for the next video, given as frames. Raises VideoInvalid."""
        self._videos += 1
        return frames_part(urls, index=self._videos, param=param, fps=fps)
