"""What a generator makes (`Chat`, `Document`) and what the trainer reads (`Sample`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Message = dict[str, Any]
ToolSpec = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One conversation that ends with an assistant message.

    `messages` and `tools` have the form that the chat template takes (arguments as mappings,
    reasoning in `reasoning_content`). `images` are uint8 [height, width, 3] in the order in which
    the messages mention them; both sides are multiples of 32. `key` names the item that decides
    the train/held-out split. `effort` None leaves the template's default. `cells` says of each
    image what lies in the square of each of its tokens (`scenes.cells`).
    """

    ability: str
    key: str
    messages: list[Message]
    tools: list[ToolSpec] | None = None
    enable_thinking: bool = False
    effort: str | None = None
    images: tuple[np.ndarray, ...] = ()
    cells: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Plain text that ends with `<|endoftext|>`; every token of it carries loss."""

    ability: str
    key: str
    text: str


Item = Chat | Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Token ids of one item, ready to be packed.

    `weight[i]` is the loss weight of *predicting* `ids[i]` from `ids[:i]`: 1 for assistant tokens
    (with their `<|im_end|>`) and document text, the caller's context weight for other text, 0 for
    the first token and for image placeholders. `images` pairs the index of the first placeholder
    with the pixels; an image of height h and width w has (h/32)*(w/32) placeholders. `cells` are
    those of the conversation.
    """

    ability: str
    ids: np.ndarray  # int32 [n]
    weight: np.ndarray  # float32 [n]
    images: tuple[tuple[int, np.ndarray], ...] = ()
    cells: tuple[np.ndarray, ...] = ()
