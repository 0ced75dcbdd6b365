"""Tools and tool choice of a Messages request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from civetta.api.fields import missing, refuse
from civetta.api.wire import decode
from civetta.chat.answer_format import AUTO, ToolChoice
from civetta.chat.message import ToolSpec

if TYPE_CHECKING:
    from civetta.api.messages.fields import AnthropicChoice, MessagesFields

_MODES = {"auto": AUTO, "none": ToolChoice(mode="none"), "any": ToolChoice(mode="required")}


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    # Hints to a hosted service: caching, loading, streaming, callers, examples.
    cache_control: dict[str, Any] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[dict[str, Any]] | None = None


def read_tools(
    fields: MessagesFields, *, drop_unknown: bool
) -> tuple[tuple[ToolSpec, ...], ToolChoice, list[str]]:
    """The tools on offer, the choice, and the paths of fields that have no effect.

    Tools that Anthropic's servers define or run are refused. Raises RequestInvalid.
    """
    specs, unused = [], []
    for index, document in enumerate(fields.tools or ()):
        path = f"tools[{index}]"
        kind = document.get("type")
        if kind not in (None, "custom"):
            refuse(
                f"{path}.type",
                f"tools of type {str(kind)[:40]!r} are run or defined by Anthropic's servers; give"
                " the tool a name, a description and an input_schema",
            )
        tool, dropped = decode(document, AnthropicTool, drop_unknown=drop_unknown, path=path)
        unused += dropped
        if tool.input_schema is None:
            missing(f"{path}.input_schema")
        specs.append(
            ToolSpec(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
                schema_key="input_schema",
            )
        )
    return tuple(specs), _choice(fields.tool_choice), unused


def _choice(given: AnthropicChoice | None) -> ToolChoice:
    if given is None:
        return AUTO
    if given.type == "tool":
        if given.name is None:
            missing("tool_choice.name")
        return ToolChoice(mode="named", name=given.name)
    if given.type not in _MODES:
        refuse("tool_choice.type", "give auto, any, tool or none")
    return _MODES[given.type]
