"""What a request says, whatever came before it, as one conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from civetta.api.billing_line import without_billing_line
from civetta.api.fields import refuse
from civetta.api.format_fields import choice_of
from civetta.api.image_fields import ImageParts
from civetta.api.responses.items import ItemReader
from civetta.api.responses.tools import Tools, read_tools
from civetta.chat.answer_format import ToolChoice
from civetta.chat.message import Conversation, Message, text_message
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from civetta.api.responses.fields import ResponsesFields
    from civetta.api.seal import ThoughtSeal
    from civetta.chat.message import ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request's conversation, what it says of tools, and the paths of what has no effect."""

    conversation: Conversation
    choice: ToolChoice
    namespaces: Mapping[str, str]
    unused: list[str]


def read_conversation(
    fields: ResponsesFields,
    earlier: Sequence[dict[str, Any]] = (),
    *,
    allow_image_urls: bool,
    drop_unknown: bool,
    seal: ThoughtSeal | None = None,
) -> Asked:
    """The instructions, the `earlier` items, the request's own; and the tools on offer.

    Without any input the user says nothing: clients probe a server so. Raises RequestInvalid naming
    what is wrong.
    """
    tools, unused = read_tools(fields.tools, drop_unknown=drop_unknown)
    choice, specs = _choose(fields.tool_choice, tools)
    images = ImageParts(allow_urls=allow_image_urls)
    reader = ItemReader(images, drop_unknown=drop_unknown, seal=seal)
    for index, item in enumerate(earlier):
        reader.read(item, f"previous_response_id.items[{index}]")
    for index, item in enumerate(input_items(fields.input)):
        reader.read(item, f"input[{index}]")
    messages = without_billing_line(_instructed(fields.instructions, reader.finish()))
    if not any(message.role in ("user", "assistant", "tool") for message in messages):
        messages += (text_message("user", ""),)
    return Asked(
        conversation=Conversation(messages=messages, tools=specs, param="input"),
        choice=choice,
        namespaces=tools.namespaces,
        unused=unused + reader.unused,
    )


def input_items(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """A request's input as items; a text is one message of the user."""
    if not isinstance(given, str):
        return given or []
    if not given:
        return []
    content = [{"type": "input_text", "text": given}]
    return [{"type": "message", "role": "user", "content": content}]


def _instructed(instructions: str | None, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return (text_message("system", instructions), *messages) if instructions else messages


def _choose(
    given: str | dict[str, Any] | None, tools: Tools
) -> tuple[ToolChoice, tuple[ToolSpec, ...]]:
    """The choice, and the tools on offer under it."""
    if not isinstance(given, dict):
        return choice_of(given), tools.specs
    kind = given.get("type")
    if kind == "allowed_tools":
        return _allowed(given, tools)
    if kind != "function":
        refuse(
            "tool_choice",
            f"{str(kind)[:40]!r} names a tool of a hosted service; only functions are called",
        )
    return ToolChoice(mode="named", name=_name_in(given, "tool_choice")), tools.specs


def _allowed(given: dict[str, Any], tools: Tools) -> tuple[ToolChoice, tuple[ToolSpec, ...]]:
    mode, listed = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        refuse("tool_choice", "allowed_tools has a mode, auto or required, and a list of tools")
    names = {
        _name_in(tool, f"tool_choice.tools[{index}]")
        for index, tool in enumerate(listed)
        if isinstance(tool, dict) and tool.get("type") == "function"
    }
    specs = tuple(spec for spec in tools.specs if spec.name in names)
    return ToolChoice(mode=mode), specs


def _name_in(given: dict[str, Any], path: str) -> str:
    name = given.get("name")
    if not isinstance(name, str):
        raise RequestInvalid(f"The field {path}.name is required.", param=f"{path}.name")
    return name
