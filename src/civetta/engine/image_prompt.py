"""Images and videos of a conversation on their way into a request; no torch, on a worker thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from civetta.chat.image_rules import BadImage
from civetta.chat.images import decode_image, prepare_image
from civetta.chat.message import ImagePart
from civetta.chat.placeholders import expand
from civetta.chat.video_decode import PreparedVideo, prepare_frames, prepare_video
from civetta.chat.video_rules import BadVideo
from civetta.chat.video_source import VideoBytes, VideoFrames
from civetta.engine.protocol import RequestImage
from civetta.engine.request import text_only
from civetta.errors import ContextOverflow, ImageInvalid, RequestInvalid, VideoInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from PIL import Image

    from civetta.chat.image_rules import ImageSupport
    from civetta.chat.image_source import EncodedImage, ImageSource
    from civetta.chat.images import PreparedImage
    from civetta.chat.message import VideoPart
    from civetta.engine.protocol import GenerateRequest, ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMedia:
    """What a conversation shows, cut for the vision tower, in order; `support` as the model says."""

    items: tuple[PreparedImage | PreparedVideo, ...]
    support: ImageSupport

    @classmethod
    def read(cls, media: Sequence[ImagePart | VideoPart], info: ModelInfo) -> PromptMedia:
        """Read, decode and cut images and videos; stops as soon as they overflow the context.

        Raises ImageInvalid or VideoInvalid naming which, RequestInvalid for a model without a
        vision tower or without videos, ContextOverflow.
        """
        if info.images is None:
            raise RequestInvalid(text_only(info.model_id), param="messages")
        found: list[PreparedImage | PreparedVideo] = []
        tokens = 0
        for part in media:
            one = (
                _image(part, info.images)
                if isinstance(part, ImagePart)
                else _video(part, info.images, info.model_id)
            )
            tokens += one.tokens
            if tokens >= info.context_tokens:
                raise ContextOverflow(tokens, info.context_tokens, 1)
            found.append(one)
        return cls(items=tuple(found), support=info.images)

    @property
    def times(self) -> list[tuple[float, ...]]:
        """The times of each video's groups of frames, in seconds."""
        return [one.seconds for one in self.items if isinstance(one, PreparedVideo)]

    def lay(self, request: GenerateRequest) -> GenerateRequest:
        """The request with images and groups of frames on placeholder ids. Raises TemplateError."""
        runs = list(self._runs())
        prompt_ids, starts = expand(
            request.prompt_ids,
            [(token_id, image.tokens) for token_id, image in runs],
            [i for i in (self.support.token_id, self.support.video_token_id) if i is not None],
        )
        placed = tuple(
            RequestImage(position=start, image=image)
            for start, (_, image) in zip(starts, runs, strict=True)
        )
        return replace(request, prompt_ids=prompt_ids, images=placed)

    def _runs(self) -> Iterator[tuple[int, PreparedImage]]:
        for one in self.items:
            if isinstance(one, PreparedVideo):
                token_id = self.support.video_token_id
                assert token_id is not None, "videos were read, so there is a placeholder"
                yield from ((token_id, group) for group in one.groups)
            else:
                yield self.support.token_id, one


def _image(part: ImagePart, support: ImageSupport) -> PreparedImage:
    source = cast("ImageSource", part.payload)
    try:
        encoded = source.read()
        return prepare_image(encoded.data, support.rules, declared=encoded.declared)
    except BadImage as error:
        raise ImageInvalid(str(error), index=source.index, param=source.param) from error


def _decoded(frames: Sequence[EncodedImage]) -> Iterator[Image.Image]:
    for number, frame in enumerate(frames, 1):
        try:
            yield decode_image(frame.data, declared=frame.declared)
        except BadImage as error:
            raise BadVideo(f"frame {number}: {error}") from error


def _video(part: VideoPart, support: ImageSupport, model_id: str) -> PreparedVideo:
    if support.video is None or support.video_token_id is None:
        raise RequestInvalid(
            f"{model_id} has no placeholder for videos; send some of the frames as images.",
            param="messages",
        )
    source = part.payload
    assert isinstance(source, VideoBytes | VideoFrames), "made by video_source"
    try:
        if isinstance(source, VideoBytes):
            return prepare_video(source.data, support.video)
        seconds = [number / source.fps for number in range(len(source.frames))]
        return prepare_frames(_decoded(source.frames), seconds, support.video)
    except BadVideo as error:
        raise VideoInvalid(str(error), index=source.index, param=source.param) from error
