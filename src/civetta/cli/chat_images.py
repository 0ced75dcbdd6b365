"""Pictures of `civetta chat`: those waiting for the next message, and how /save writes them."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from civetta.chat.image_rules import BadImage
from civetta.chat.image_source import ImageBytes, bytes_part, file_part
from civetta.errors import ImageInvalid

if TYPE_CHECKING:
    from civetta.chat.message import ImagePart, Message


@dataclass(slots=True, kw_only=True)
class PendingImages:
    """Pictures named so far for the message to come; `before` were sent already."""

    before: int = 0
    parts: list[ImagePart] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Read a file and see that it is a picture; raises ImageInvalid."""
        from civetta.chat.images import decode_image  # brings numpy and PIL

        index = self.before + len(self.parts) + 1
        part = file_part(Path(name).expanduser(), index=index)
        try:
            decode_image(_data(part))
        except BadImage as error:
            raise ImageInvalid(f"{name}: {error}", index=index) from error
        self.parts.append(part)

    def take(self) -> tuple[ImagePart, ...]:
        """The pictures, which are sent now."""
        taken, self.parts = tuple(self.parts), []
        self.before += len(taken)
        return taken

    def restart(self, before: int = 0) -> None:
        """Another conversation, which has so many pictures, goes on; none wait."""
        self.before, self.parts = before, []


def saved(message: Message) -> list[str]:
    """A message's pictures as base64."""
    return [base64.b64encode(_data(part)).decode() for part in message.images]


def restored(texts: object, first: int) -> tuple[ImagePart, ...]:
    """Pictures that `saved` wrote, numbered from `first`. Raises ValueError or TypeError."""
    if not isinstance(texts, list):
        raise TypeError
    return tuple(
        bytes_part(base64.b64decode(text, validate=True), index=first + number)
        for number, text in enumerate(texts)
    )


def _data(part: ImagePart) -> bytes:
    source = part.payload
    assert isinstance(source, ImageBytes), "pictures of the terminal come from files"
    return source.image.data
