"""What a whole answer has to look like, as requests of any dialect ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from civetta.chat.schema import schema_grammar
from civetta.errors import RequestInvalid
from civetta.types import Grammar

if TYPE_CHECKING:
    from collections.abc import Mapping

GRAMMAR_BYTES_MAX = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The form of an answer. `schema` for json_schema, `text` for regex, lark and gbnf.

    `strict` refuses a schema that cannot be carried out in full. `param` is the field's place in
    the request, for errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark", "gbnf"]
    schema: Mapping[str, Any] | None = None
    text: str = ""
    strict: bool = False
    param: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether a reply calls tools: as it likes, never, at least once, or the `name`d one once."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


AUTO = ToolChoice()


def answer_grammar(form: AnswerFormat) -> Grammar:
    """The answers of that form. Raises RequestInvalid with code `invalid_schema`."""
    if form.kind == "json_object":
        return schema_grammar({"type": "object"}, strict=False, param=form.param)
    if form.kind == "json_schema":
        assert form.schema is not None, "a json_schema has a schema"
        return schema_grammar(form.schema, strict=form.strict, param=form.param)
    if len(form.text.encode()) > GRAMMAR_BYTES_MAX:
        raise RequestInvalid(
            f"The {form.kind} is larger than {GRAMMAR_BYTES_MAX} bytes: simplify it.",
            param=form.param,
            code="invalid_schema",
        )
    return Grammar(kind=form.kind, text=form.text)
