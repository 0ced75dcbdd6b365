"""Fields that bind an answer: its form, and whether it calls tools."""

from __future__ import annotations

from typing import Any

import msgspec

from civetta.api.fields import missing, refuse
from civetta.chat.answer_format import AnswerFormat, ToolChoice


class SchemaFields(msgspec.Struct, kw_only=True):
    """The inner object of a `json_schema` format; name and description are labels."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class FormatFields(msgspec.Struct, kw_only=True):
    """`response_format`: OpenAI's types, llama.cpp's `schema`, and civetta's regex and lark."""

    type: str
    json_schema: SchemaFields | None = None
    schema: dict[str, Any] | None = None
    regex: str | None = None
    lark: str | None = None


def choice_of(value: str | dict[str, Any] | None, param: str = "tool_choice") -> ToolChoice:
    """The `tool_choice` of a request, nested as OpenAI's or flat. Raises RequestInvalid."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        modes: dict[str, ToolChoice] = {
            "auto": ToolChoice(),
            "none": ToolChoice(mode="none"),
            "required": ToolChoice(mode="required"),
        }
        if value in modes:
            return modes[value]
        refuse(param, "use auto, none, required, or the name of a function")
    inner = value.get("function", value)
    name = inner.get("name") if isinstance(inner, dict) else None
    if value.get("type", "function") != "function" or not isinstance(name, str):
        refuse(
            param, 'use auto, none, required, or {"type": "function", "function": {"name": ...}}'
        )
    return ToolChoice(mode="named", name=name)


def format_of(fields: FormatFields, param: str = "response_format") -> AnswerFormat | None:
    """The form that a `response_format` asks for; None for text. Raises RequestInvalid."""
    kind = fields.type
    if kind not in ("text", "json_object", "json_schema", "regex", "lark"):
        refuse(f"{param}.type", "use text, json_object, json_schema, regex or lark")
    takes = "schema" if kind == "json_object" else kind
    for key in ("json_schema", "schema", "regex", "lark"):
        if key != takes and getattr(fields, key) is not None:
            refuse(f"{param}.{key}", f"it does not go with type {kind}")
    if kind == "text":
        return None
    value = getattr(fields, takes)
    if value is None and kind != "json_object":
        missing(f"{param}.{takes}")
    match kind:
        case "json_object" if value is None:
            return AnswerFormat(kind="json_object", param=param)
        case "json_object":
            return AnswerFormat(kind="json_schema", schema=value, param=f"{param}.schema")
        case "json_schema":
            return AnswerFormat(
                kind="json_schema",
                schema=value.schema,
                strict=bool(value.strict),
                param=f"{param}.json_schema.schema",
            )
    return AnswerFormat(
        kind="regex" if kind == "regex" else "lark", text=value, param=f"{param}.{kind}"
    )
