"""Turns of content blocks to messages.

A user's turn comes apart: each tool result becomes a message of its own, with the text and images
around them in order. A system turn folds into the leading one with all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from civetta.api.billing_line import without_billing_line
from civetta.api.fields import missing, refuse
from civetta.api.image_fields import refuse_video
from civetta.api.messages.signature import thought_of
from civetta.api.wire import decode
from civetta.chat.message import Message, Part, TextPart, ToolCall, text_message
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from civetta.api.image_fields import ImageParts
    from civetta.api.messages.fields import AnthropicMessage
    from civetta.chat.message import ImagePart

T = TypeVar("T")
# What other servers ran within an assistant's turn; it says nothing to a model that cannot run it.
HOSTED = frozenset(
    {
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
        "fallback",
    }
)


class TextBlock(msgspec.Struct, kw_only=True):
    """Text."""

    type: str
    text: str
    cache_control: Any = None
    citations: Any = None


class ImageSource(msgspec.Struct, kw_only=True):
    """Where an image is: base64 data with its media type, or an address."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(msgspec.Struct, kw_only=True):
    """An image."""

    type: str
    source: ImageSource
    cache_control: Any = None
    transformations: dict[str, Any] | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True):
    """A thought."""

    type: str
    thinking: str = ""
    signature: str = ""
    cache_control: Any = None


class RedactedBlock(msgspec.Struct, kw_only=True):
    """A thought that only Anthropic's servers can read."""

    type: str
    data: str = ""
    cache_control: Any = None


class ToolUseBlock(msgspec.Struct, kw_only=True):
    """A call."""

    type: str
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None
    toolset_name: str | None = None


class ToolResultBlock(msgspec.Struct, kw_only=True):
    """What a call returned."""

    type: str
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: str | None = None


class BlockReader:
    """Reads turns in order; `finish` gives the messages, `unused` the paths without effect."""

    def __init__(self, images: ImageParts, *, drop_unknown: bool) -> None:
        self._images = images
        self._drop_unknown = drop_unknown
        self._messages: list[Message] = []
        self.unused: list[str] = []

    def system(self, content: str | list[dict[str, Any]], path: str = "system") -> None:
        """Take the system prompt, or a system turn."""
        if isinstance(content, str):
            texts = [content]
        else:
            blocks = [self._read(b, TextBlock, f"{path}[{n}]") for n, b in enumerate(content)]
            for number, block in enumerate(blocks):
                if block.type != "text":
                    _refuse_block(block.type, f"{path}[{number}]", "text is")
            texts = [block.text for block in blocks]
        # One message a block: each may begin with a line that is taken out, and all are folded.
        self._messages += [text_message("system", text) for text in texts]

    def turn(self, message: AnthropicMessage, path: str) -> None:
        """Take one turn. Raises RequestInvalid naming what is wrong with it."""
        content = message.content
        if message.role == "system":
            self.system(content, f"{path}.content")
            return
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message.role == "user":
            self._user(blocks, f"{path}.content")
        elif message.role == "assistant":
            self._assistant(blocks, f"{path}.content")
        else:
            raise RequestInvalid(
                f"{path}.role is {message.role[:40]!r}: use user, assistant or system.",
                param=f"{path}.role",
            )

    def finish(self) -> tuple[Message, ...]:
        """The messages of all turns."""
        return without_billing_line(tuple(self._messages))

    def _user(self, blocks: list[dict[str, Any]], path: str) -> None:
        parts: list[Part] = []
        for number, document in enumerate(blocks):
            place = f"{path}[{number}]"
            if document.get("type") != "tool_result":
                parts.append(self._part(document, place))
                continue
            self._said(parts)
            parts = []
            block = self._read(document, ToolResultBlock, place)
            self._messages.append(
                Message(
                    role="tool",
                    parts=self._result(block, f"{place}.content"),
                    tool_call_id=block.tool_use_id,
                )
            )
        self._said(parts)

    def _said(self, parts: list[Part]) -> None:
        if parts:
            self._messages.append(Message(role="user", parts=tuple(parts)))

    def _result(self, block: ToolResultBlock, path: str) -> tuple[Part, ...]:
        if block.content is None:
            return ()
        if isinstance(block.content, str):
            return (TextPart(text=block.content),)
        return tuple(self._part(b, f"{path}[{n}]") for n, b in enumerate(block.content))

    def _part(self, document: dict[str, Any], path: str) -> Part:
        kind = document.get("type")
        if kind == "text":
            return TextPart(text=self._read(document, TextBlock, path).text)
        refuse_video(kind, path)
        if kind != "image":
            document_cure = "send the document's text"
            others = "text, image and tool_result are"
            _refuse_block(kind, path, document_cure if kind == "document" else others)
        return self._image(self._read(document, ImageBlock, path).source, f"{path}.source")

    def _image(self, source: ImageSource, path: str) -> ImagePart:
        if source.type == "base64":
            if source.data is None:
                missing(f"{path}.data")
            url = f"data:{source.media_type or 'image/png'};base64,{source.data}"
            return self._images.take(url, f"{path}.data")
        if source.type != "url":
            refuse(f"{path}.type", "give base64 or url; files are not kept here")
        if source.url is None:
            missing(f"{path}.url")
        return self._images.take(source.url, f"{path}.url")

    def _assistant(self, blocks: list[dict[str, Any]], path: str) -> None:
        thoughts: list[str] = []
        parts: list[Part] = []
        calls: list[ToolCall] = []
        for number, document in enumerate(blocks):
            place = f"{path}[{number}]"
            match document.get("type"):
                case "text":
                    parts.append(TextPart(text=self._read(document, TextBlock, place).text))
                case "thinking":
                    thought = self._read(document, ThinkingBlock, place)
                    thoughts.append(thought_of(thought.thinking, thought.signature))
                case "redacted_thinking":
                    self._read(document, RedactedBlock, place)
                    self.unused.append(f"{place} (redacted_thinking)")
                case "tool_use":
                    call = self._read(document, ToolUseBlock, place)
                    calls.append(ToolCall(id=call.id, name=call.name, arguments=call.input))
                case kind if kind in HOSTED:
                    self.unused.append(f"{place} ({kind})")
                case kind:
                    _refuse_block(kind, place, "text, thinking and tool_use are")
        self._messages.append(
            Message(
                role="assistant",
                parts=tuple(parts),
                reasoning="\n\n".join(text for text in thoughts if text) or None,
                tool_calls=tuple(calls),
            )
        )

    def _read(self, document: dict[str, Any], kind: type[T], path: str) -> T:
        block, dropped = decode(document, kind, drop_unknown=self._drop_unknown, path=path)
        self.unused += dropped
        return block


def _refuse_block(kind: object, path: str, cure: str) -> NoReturn:
    if not isinstance(kind, str):
        missing(f"{path}.type")
    refuse(path, f"blocks of type {kind[:40]!r} are not supported here; {cure}")
