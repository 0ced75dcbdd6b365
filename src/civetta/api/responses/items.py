"""Input items to messages: what a client sends, and what earlier responses left.

An assistant's turn comes apart in the Responses API: its thought, its text and each of its calls
are items. They are joined again here, so that a replayed turn renders as it was sampled. Calls of
hosted tools that another server made are passed over and reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from civetta.api.fields import refuse
from civetta.api.image_fields import refuse_video
from civetta.api.wire import decode
from civetta.chat.message import Message, Part, Role, TextPart, ToolCall, parse_json_object
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from civetta.api.image_fields import ImageParts
    from civetta.api.seal import ThoughtSeal

HOSTED = frozenset(
    {
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class PartFields(msgspec.Struct, kw_only=True):
    """One part of a message, of an output of a tool, or of a thought."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None


class MessageItem(msgspec.Struct, kw_only=True):
    """A message; `type` may be left out."""

    role: str
    content: str | list[PartFields]
    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ReasoningItem(msgspec.Struct, kw_only=True):
    """A thought: its text, or the summary that has stood for it; neither is required."""

    type: str
    id: str | None = None
    summary: list[PartFields] | None = None
    content: list[PartFields] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class CallItem(msgspec.Struct, kw_only=True):
    """A call of a function."""

    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None
    caller: Any = None


class CustomCallItem(msgspec.Struct, kw_only=True):
    """A call whose argument is one text; it is read as a function of `input`."""

    type: str
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None
    caller: Any = None


class OutputItem(msgspec.Struct, kw_only=True):
    """What a call returned."""

    type: str
    call_id: str
    output: str | list[PartFields]
    id: str | None = None
    status: str | None = None
    name: str | None = None
    caller: Any = None


_KINDS: dict[str, type[Any]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "custom_tool_call": CustomCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call_output": OutputItem,
}


class ItemReader:
    """Reads items in order; `finish` gives the messages, `unused` the paths without effect.

    `seal` opens thoughts that this server sealed; others fall back on the text beside them.
    """

    def __init__(
        self, images: ImageParts, *, drop_unknown: bool, seal: ThoughtSeal | None = None
    ) -> None:
        self._images = images
        self._seal = seal
        self._drop_unknown = drop_unknown
        self._messages: list[Message] = []
        self._turn = _Turn()
        self.unused: list[str] = []

    def read(self, document: dict[str, Any], path: str) -> None:
        """Take one item. Raises RequestInvalid naming what is wrong with it."""
        kind = document.get("type", "message")
        if kind in HOSTED:
            self.unused.append(f"{path} ({kind})")
            return
        if kind not in _KINDS:
            _refuse_kind(kind, path)
        for name in ("content", "output"):
            _refuse_videos(document.get(name), f"{path}.{name}")
        item, dropped = decode(document, _KINDS[kind], drop_unknown=self._drop_unknown, path=path)
        self.unused += dropped
        match item:
            case MessageItem():
                self._message(item, path)
            case ReasoningItem():
                self._reasoning(item, path)
            case CallItem():
                arguments = parse_json_object(item.arguments, f"{path}.arguments")
                self._turn.calls.append(
                    ToolCall(id=item.call_id, name=item.name, arguments=arguments)
                )
            case CustomCallItem():
                self._turn.calls.append(
                    ToolCall(id=item.call_id, name=item.name, arguments={"input": item.input})
                )
            case OutputItem():
                self._close_turn()
                parts = self._parts(item.output, f"{path}.output")
                self._messages.append(Message(role="tool", parts=parts, tool_call_id=item.call_id))

    def finish(self) -> tuple[Message, ...]:
        """The messages of all items."""
        self._close_turn()
        return tuple(self._messages)

    def _message(self, item: MessageItem, path: str) -> None:
        if item.role not in _ROLES:
            raise RequestInvalid(
                f"{path}.role is {item.role[:40]!r}: use one of {', '.join(_ROLES)}.",
                param=f"{path}.role",
            )
        parts = self._parts(item.content, f"{path}.content")
        if item.role == "assistant":
            self._turn.parts += parts
            return
        if item.role != "user" and not all(isinstance(part, TextPart) for part in parts):
            raise RequestInvalid(
                f"{path} puts an image into a {item.role} message: move it to a user message.",
                param=f"{path}.content",
                code="invalid_messages",
            )
        self._close_turn()
        self._messages.append(Message(role=cast("Role", item.role), parts=parts))

    def _reasoning(self, item: ReasoningItem, path: str) -> None:
        if self._turn.parts or self._turn.calls:  # a thought begins a turn
            self._close_turn()
        sealed = item.encrypted_content
        if sealed is not None:  # the exact thought goes before what was shown of it
            thought = None if self._seal is None else self._seal.open(sealed)
            if thought is not None:
                self._turn.thoughts.append(thought)
                return
            self.unused.append(f"{path}.encrypted_content")
        name = "content" if item.content else "summary"
        parts = self._parts(getattr(item, name) or [], f"{path}.{name}")
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        self._turn.thoughts.append("\n\n".join(texts) if name == "summary" else "".join(texts))

    def _close_turn(self) -> None:
        turn, self._turn = self._turn, _Turn()
        if turn.thoughts or turn.parts or turn.calls:
            self._messages.append(
                Message(
                    role="assistant",
                    parts=tuple(turn.parts),
                    reasoning="\n\n".join(text for text in turn.thoughts if text) or None,
                    tool_calls=tuple(turn.calls),
                )
            )

    def _parts(self, content: str | list[PartFields], path: str) -> tuple[Part, ...]:
        if isinstance(content, str):
            return (TextPart(text=content),)
        return tuple(self._part(part, f"{path}[{n}]") for n, part in enumerate(content))

    def _part(self, part: PartFields, path: str) -> Part:
        if part.type in _TEXTS:
            return TextPart(text=_required(part.text, f"{path}.text"))
        if part.type == "refusal":
            return TextPart(text=_required(part.refusal, f"{path}.refusal"))
        if part.type != "input_image":
            refuse(path, f"parts of type {part.type[:40]!r} are not supported, text and images are")
        if part.file_id is not None:
            refuse(f"{path}.file_id", "files are not kept here; send image_url as a data URL")
        url = _required(part.image_url, f"{path}.image_url")
        return self._images.take(url, f"{path}.image_url", detail=part.detail)


class _Turn:
    """What of an assistant's turn has come."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.parts: list[Part] = []
        self.calls: list[ToolCall] = []


def _refuse_videos(parts: object, path: str) -> None:
    """By their type, since their other fields are unknown too."""
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict):
            refuse_video(part.get("type"), f"{path}[{number}]")


def _required(text: str | None, path: str) -> str:
    if text is None:
        raise RequestInvalid(f"The field {path} is required.", param=path)
    return text


def _refuse_kind(kind: object, path: str) -> NoReturn:
    cures = {
        "item_reference": "send the item itself, or continue by previous_response_id",
        "compaction": "send the items that it stands for",
    }
    cure = (
        cures.get(kind, "messages, calls, outputs and reasoning are")
        if isinstance(kind, str)
        else "give a text"
    )
    refuse(f"{path}.type", f"items of type {str(kind)[:40]!r} are not supported; {cure}")
