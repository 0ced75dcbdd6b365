"""The images of a conversation on their way into a request; no torch, on a worker thread."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from civetta.chat.image_rules import BadImage
from civetta.chat.images import prepare_image
from civetta.chat.message import ImagePart
from civetta.chat.placeholders import expand
from civetta.engine.protocol import RequestImage
from civetta.engine.request import text_only
from civetta.errors import ContextOverflow, ImageInvalid, RequestInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.chat.image_source import ImageSource
    from civetta.chat.images import PreparedImage
    from civetta.chat.message import VideoPart
    from civetta.engine.protocol import GenerateRequest, ModelInfo


def prepare_images(
    media: Sequence[ImagePart | VideoPart], info: ModelInfo
) -> tuple[PreparedImage, ...]:
    """Read, decode and cut the images, in order; stops as soon as they overflow the context.

    Raises ImageInvalid naming the image, RequestInvalid for a model without a vision tower or for
    a video, ContextOverflow.
    """
    if info.images is None:
        raise RequestInvalid(text_only(info.model_id), param="messages")
    found: list[PreparedImage] = []
    tokens = 0
    for part in media:
        if not isinstance(part, ImagePart):
            raise RequestInvalid(
                "Videos are not read; send some of its frames as images.", param="messages"
            )
        source = cast("ImageSource", part.payload)
        try:
            encoded = source.read()
            image = prepare_image(encoded.data, info.images.rules, declared=encoded.declared)
        except BadImage as error:
            raise ImageInvalid(str(error), index=source.index, param=source.param) from error
        tokens += image.tokens
        if tokens >= info.context_tokens:
            raise ContextOverflow(tokens, info.context_tokens, 1)
        found.append(image)
    return tuple(found)


def lay_images(
    request: GenerateRequest, media: Sequence[ImagePart | VideoPart], info: ModelInfo
) -> GenerateRequest:
    """The request with its images on placeholder ids; raises TemplateError and as prepare_images."""
    images = prepare_images(media, info)
    assert info.images is not None, "images are prepared, so the model takes them"
    tokens = [image.tokens for image in images]
    prompt_ids, starts = expand(request.prompt_ids, info.images.token_id, tokens)
    placed = tuple(
        RequestImage(position=start, image=image)
        for start, image in zip(starts, images, strict=True)
    )
    return replace(request, prompt_ids=prompt_ids, images=placed)
