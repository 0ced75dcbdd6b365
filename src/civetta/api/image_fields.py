"""Images in requests, whatever the dialect: numbered in order, data URLs or https addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.api.fields import refuse
from civetta.chat.image_source import image_part

if TYPE_CHECKING:
    from civetta.chat.message import ImagePart

DETAILS = (None, "auto", "high", "original")


class ImageParts:
    """Turns the images of one request into parts; each gets the next number."""

    def __init__(self, *, allow_urls: bool) -> None:
        self._allow_urls = allow_urls
        self._count = 0

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
        return image_part(url, index=self._count, param=param, allow_urls=self._allow_urls)
