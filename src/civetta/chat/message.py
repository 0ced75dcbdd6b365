"""A conversation as plain frozen data, and the rules that make it renderable.

The dialects build a `Conversation`; `normalise` refuses or repairs what the chat template of the
model would refuse (model.md A.10, F-21) so that a template never sees a shape it cannot render.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from civetta.chat.json_text import read_json
from civetta.chat.number_spelling import respelled
from civetta.errors import RequestInvalid

Role = Literal["system", "developer", "user", "assistant", "tool"]
JsonObject = Mapping[str, Any]

ROLES: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME_CHARS_MAX = 64
_TOOL_NAME_REFUSED = frozenset(' <>"\\')
_MEDIA_STAND_IN = "\ufffc"  # only keeps media from looking like blank text


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A run of text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """One image; `digest` identifies its pixels, `payload` is opaque to this package."""

    digest: str
    payload: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPart:
    """One video; `digest` identifies its frames, `payload` is opaque to this package."""

    digest: str
    payload: object = field(default=None, repr=False, compare=False)


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A function the model may call; `parameters` is its JSON schema, {} when it takes none.

    `strict` asks for schema-exact decoding; it never changes the prompt. `param` is the field of the
    request that declares it, where that is not its place among the tools, and `schema_key` the field
    within that holds `parameters`: what messages about them name.
    """

    name: str
    description: str | None = None
    parameters: JsonObject = field(default_factory=dict)
    strict: bool | None = None
    param: str | None = field(default=None, compare=False)
    schema_key: str = field(default="parameters", compare=False)

    def field_at(self, index: int) -> str:
        """The field that declares it; `index` is its place among the tools."""
        return self.param or f"tools[{index}]"

    def schema_field_at(self, index: int) -> str:
        """The field that holds its schema."""
        return f"{self.field_at(index)}.{self.schema_key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call made by the assistant.

    `arguments` may be JSON text, as OpenAI clients send it, until `normalise` has parsed it.
    """

    id: str
    name: str
    arguments: JsonObject | str = field(default_factory=dict)

    @property
    def mapping(self) -> JsonObject:
        """The parsed arguments; the conversation must have been normalised."""
        assert not isinstance(self.arguments, str), "normalise() parses tool arguments first"
        return self.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. `reasoning` and `tool_calls` belong to assistants, `tool_call_id` to tools."""

    role: Role
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The text parts joined; media leave nothing."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def media(self) -> tuple[ImagePart | VideoPart, ...]:
        """The images and videos in order."""
        return tuple(part for part in self.parts if not isinstance(part, TextPart))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """The images in order."""
        return tuple(part for part in self.parts if isinstance(part, ImagePart))

    @property
    def videos(self) -> tuple[VideoPart, ...]:
        """The videos in order."""
        return tuple(part for part in self.parts if isinstance(part, VideoPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages in order and the tools on offer; `param` is the field of the request that holds them."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    param: str = field(default="messages", compare=False)

    @property
    def media(self) -> tuple[ImagePart | VideoPart, ...]:
        """All images and videos in prompt order."""
        return tuple(part for message in self.messages for part in message.media)


def text_message(role: Role, text: str, *, reasoning: str | None = None) -> Message:
    """A message that holds one text."""
    return Message(role=role, parts=(TextPart(text=text),), reasoning=reasoning)


def normalise(conversation: Conversation) -> Conversation:
    """The conversation in the one shape that templates accept; idempotent.

    - `developer` means `system`; all system texts, stripped, are joined by a blank line in order
      into one leading system message (none when they are blank).
    - tool arguments given as JSON text become mappings; an empty text means no arguments. Their
      numbers are spelled as the call's id says (number_spelling.py).
    Raises RequestInvalid with code `invalid_messages` (no message, unknown role, media in a system
    message, calls or reasoning outside an assistant message, bad arguments, no user query) or
    `invalid_tools` (bad or repeated name, parameters that are no object); `param` names the field.
    """
    _check_tools(conversation.tools)
    if not conversation.messages:
        _refuse("The conversation is empty; send at least one user message.", conversation.param)
    system: list[str] = []
    rest: list[Message] = []
    for index, message in enumerate(conversation.messages):
        _check_message(message, f"messages[{index}]")
        if message.role in ("system", "developer"):
            system.append(message.text.strip())
        else:
            rest.append(_parse_calls(message, f"messages[{index}]"))
    if last_query_index(rest) is None:
        _refuse(
            "The conversation has no user query: add a user message that is more than a tool"
            " response.",
            conversation.param,
        )
    folded = "\n\n".join(text for text in system if text)
    head = [text_message("system", folded)] if folded else []
    return replace(conversation, messages=tuple(head + rest))


def last_query_index(messages: list[Message] | tuple[Message, ...]) -> int | None:
    """Index of the last user message that is not wholly one tool response, or None (A.10)."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "user" and not _is_tool_response(messages[index]):
            return index
    return None


def parse_json_object(text: str, param: str) -> dict[str, Any]:
    """The JSON object that `text` holds; a blank text is {}.

    Raises RequestInvalid with code `invalid_messages` when it is anything else.
    """
    if not text.strip():
        return {}
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:
        raise RequestInvalid(
            f"{param} is not valid JSON ({error}); send the arguments as a JSON object.",
            param=param,
            code="invalid_messages",
        ) from error
    if not isinstance(value, dict):
        _refuse(f"{param} must be a JSON object, not {type(value).__name__}.", param)
    return value


def _refuse(sentence: str, param: str, code: str = "invalid_messages") -> NoReturn:
    raise RequestInvalid(sentence, param=param, code=code)


def _is_tool_response(message: Message) -> bool:
    text = "".join(
        part.text if isinstance(part, TextPart) else _MEDIA_STAND_IN for part in message.parts
    ).strip()
    return text.startswith("<tool_response>") and text.endswith("</tool_response>")


def _check_message(message: Message, param: str) -> None:
    if message.role not in ROLES:
        _refuse(
            f"{param}.role is {message.role!r}; use one of {', '.join(ROLES)}.", f"{param}.role"
        )
    if message.role in ("system", "developer") and message.media:
        _refuse(
            f"{param} puts an image or video into a {message.role} message; move it to a user"
            " message.",
            f"{param}.content",
        )
    if message.role != "assistant" and message.tool_calls:
        _refuse(f"{param} has tool calls but is no assistant message.", f"{param}.tool_calls")
    if message.role != "assistant" and message.reasoning is not None:
        _refuse(f"{param} has reasoning but is no assistant message.", f"{param}.reasoning")


def _parse_calls(message: Message, param: str) -> Message:
    if not message.tool_calls:
        return message
    calls = []
    for index, call in enumerate(message.tool_calls):
        given = call.arguments
        if isinstance(given, str):
            given = parse_json_object(given, f"{param}.tool_calls[{index}].arguments")
        calls.append(replace(call, arguments=respelled(given, call.id)))
    return replace(message, tool_calls=tuple(calls))


def _check_tools(tools: tuple[ToolSpec, ...]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        param, schema_param = tool.field_at(index), tool.schema_field_at(index)
        if not _is_tool_name(tool.name):
            _refuse(
                f"{param}.name {tool.name!r} must be 1 to {TOOL_NAME_CHARS_MAX} printable ASCII"
                ' characters without space, <, >, " or backslash.',
                f"{param}.name",
                "invalid_tools",
            )
        if tool.name in seen:
            _refuse(
                f"{param}.name {tool.name!r} is declared twice.", f"{param}.name", "invalid_tools"
            )
        if not isinstance(tool.parameters, Mapping):
            _refuse(
                f"{schema_param} must be a JSON schema object.",
                schema_param,
                "invalid_tools",
            )
        seen.add(tool.name)


def _is_tool_name(name: str) -> bool:
    return (
        0 < len(name) <= TOOL_NAME_CHARS_MAX
        and name.isascii()
        and name.isprintable()
        and not _TOOL_NAME_REFUSED.intersection(name)
    )
