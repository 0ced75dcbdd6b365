"""Where an image of a conversation comes from: bytes, a data URL, or an address to fetch."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from civetta.chat.image_rules import BadImage
from civetta.chat.message import ImagePart
from civetta.errors import ImageInvalid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from civetta.chat.message import VideoPart

_LABELS = {
    "image/png": "PNG",
    "image/apng": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/pjpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
    "image/x-ms-bmp": "BMP",
}
_READ = "image/png, image/jpeg, image/webp, image/gif and image/bmp are read"
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """Bytes as a file has them; `declared` is the format that their sender names, if any."""

    data: bytes = field(repr=False)
    declared: str | None = None


class ImageSource(Protocol):
    """The payload of an ImagePart: read once, on a worker thread."""

    @property
    def index(self) -> int:
        """Number of the image in its request, from 1."""
        ...

    @property
    def param(self) -> str | None:
        """The request's field that has it."""
        ...

    def read(self) -> EncodedImage:
        """The encoded image; raises BadImage."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBytes:
    """An image that is here already."""

    index: int
    image: EncodedImage
    param: str | None = None

    def read(self) -> EncodedImage:
        """The bytes."""
        return self.image


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAddress:
    """An image to fetch over https."""

    index: int
    url: str
    param: str | None = None
    fetch: Callable[[str], bytes]

    def read(self) -> EncodedImage:
        """Fetch it; raises BadImage."""
        return EncodedImage(data=self.fetch(self.url))


def image_part(
    url: str, *, index: int, param: str, fetch: Callable[[str], bytes] | None = None
) -> ImagePart:
    """The part for a data URL, or for an https address where there is something to `fetch` it.

    Raises ImageInvalid for anything else, and for a data URL that is not well-formed.
    """
    scheme = url[:8].partition(":")[0].lower()
    try:
        if scheme == "data":
            image = read_data_url(url)
            return _part(image.data, ImageBytes(index=index, image=image, param=param))
        if scheme == "https" and fetch is not None:
            address = ImageAddress(index=index, url=url, param=param, fetch=fetch)
            return _part(url.encode(), address)
    except BadImage as error:
        raise ImageInvalid(str(error), index=index, param=param) from error
    if scheme in ("http", "https"):
        cure = "only https is fetched" if fetch is not None else "--allow-image-urls is off"
        reason = f"it is an address on the network, and {cure}; send it as a data URL"
    else:
        reason = f"{url[:_SHOWN_CHARS]!r} is no data URL (data:image/png;base64,...)"
    raise ImageInvalid(reason, index=index, param=param)


def is_fetched(part: ImagePart | VideoPart) -> bool:
    """Whether a part's bytes come over the network when it is read."""
    return isinstance(part.payload, ImageAddress)


def file_part(path: Path, *, index: int) -> ImagePart:
    """The part for a file; raises ImageInvalid when it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror})"
        raise ImageInvalid(reason, index=index) from error
    return bytes_part(data, index=index)


def bytes_part(data: bytes, *, index: int) -> ImagePart:
    """The part for encoded bytes of unstated format."""
    return _part(data, ImageBytes(index=index, image=EncodedImage(data=data)))


def read_data_url(url: str) -> EncodedImage:
    """The image of `data:MEDIA_TYPE[;NAME=VALUE]...;base64,DATA`. Raises BadImage."""
    head, comma, body = url.partition(",")
    media_type, *options = head[len("data:") :].split(";")
    if not comma or not options or options[-1].strip().lower() != "base64":
        raise BadImage("its data URL is not of the form data:image/png;base64,...")
    declared = _LABELS.get(media_type.strip().lower())
    if declared is None:
        video = media_type.strip().lower().startswith("video/")
        cure = "a video is a video_url part of /v1/chat/completions" if video else _READ
        raise BadImage(f"its media type is {media_type[:_SHOWN_CHARS]!r}; {cure}")
    try:
        data = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage("its base64 is broken") from error
    return EncodedImage(data=data, declared=declared)


def _part(identity: bytes, source: ImageSource) -> ImagePart:
    return ImagePart(digest=hashlib.sha256(identity).hexdigest(), payload=source)
