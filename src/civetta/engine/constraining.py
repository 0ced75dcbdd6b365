"""From tools and format of a request to the constraint of its reply."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from civetta.chat.answer_format import answer_grammar
from civetta.chat.schema import check_bounds, walk
from civetta.chat.tool_grammar import (
    LooseParameter,
    call_tail_grammar,
    calls_grammar,
    parameter_schema,
    takes_text,
)
from civetta.chat.tool_strings import text_bounds
from civetta.decode.grammar_text import json_grammar, verdict_on
from civetta.engine.schema_gaps import format_gaps, tool_gaps
from civetta.errors import RequestInvalid
from civetta.types import Constraint, Grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.chat.answer_format import AnswerFormat, ToolChoice
    from civetta.chat.message import ToolSpec
    from civetta.engine.client import ReplyOptions
    from civetta.types import SchemaGap

_verdict = lru_cache(maxsize=512)(verdict_on)


def constraint_of(tools: Sequence[ToolSpec], options: ReplyOptions) -> Constraint | None:
    """What the reply is bound to; None when it is free. Takes as long as compiling.

    With tools that need not be called, calls are bound from `<tool_call>` on; a format binds the
    whole answer, which may then be calls instead. Tools that have no grammar, because they are too
    many say, are not bound where nothing asks that they be. Raises RequestInvalid: `invalid_schema` for a
    format, `invalid_tools` for strict tools that cannot be carried out and for a choice of none.
    """
    form, choice = options.answer_format, options.tool_choice
    places = {tool.name: tool.schema_field_at(index) for index, tool in enumerate(tools)}
    tools = _chosen(tools, choice)
    if not tools:
        return None if form is None else format_constraint(form)
    must = choice.mode in ("required", "named")
    try:
        loose, gaps = _loose_parameters(tools, places)
    except RequestInvalid:
        if must or form is not None or any(tool.strict is True for tool in tools):
            raise
        return None
    many = options.parallel_tool_calls and choice.mode != "named"
    if not must and form is None:
        return Constraint(
            grammar=Grammar(kind="lark", text=call_tail_grammar(tools, loose=loose)),
            starts="call",
            calls_max=None if many else 1,
            param="tools",
            gaps=gaps,
        )
    otherwise = None
    if form is not None and not must:
        if form.kind in ("lark", "gbnf"):
            raise RequestInvalid(
                "A Lark grammar binds the whole answer and leaves no room for calls: leave out the"
                " tools, or set tool_choice to none.",
                param=form.param,
            )
        other = format_constraint(form)
        otherwise, gaps = other.grammar, gaps + other.gaps
    text = calls_grammar(tools, many=many, loose=loose, otherwise=otherwise)
    return Constraint(grammar=Grammar(kind="lark", text=text), param="tools", gaps=gaps)


def _chosen(tools: Sequence[ToolSpec], choice: ToolChoice) -> Sequence[ToolSpec]:
    if choice.mode not in ("required", "named"):
        return tools
    if choice.mode == "named":
        tools = [tool for tool in tools if tool.name == choice.name]
    if not tools:
        named = f" {choice.name!r}" if choice.mode == "named" else ""
        raise RequestInvalid(
            f"tool_choice asks for a call of the tool{named}, and there is none: declare it in tools.",
            param="tool_choice",
            code="invalid_tools",
        )
    return tools


def format_constraint(form: AnswerFormat) -> Constraint:
    """What binds a whole answer to a format. Raises RequestInvalid with code `invalid_schema`."""
    grammar = answer_grammar(form)
    verdict = _verdict(grammar)
    if verdict.problem is not None:
        place, inner = "", verdict.problem
        if form.schema is not None:
            place, inner = _culprit(form.schema, inner, strict=form.strict)
        _refuse(form.param, place, inner, code="invalid_schema")
    gaps = () if form.schema is None else format_gaps(form.schema, verdict, form.param)
    return Constraint(grammar=grammar, param=form.param, gaps=gaps)


def _loose_parameters(
    tools: Sequence[ToolSpec], places: Mapping[str, str]
) -> tuple[list[LooseParameter], tuple[SchemaGap, ...]]:
    """Parameters that take anything because their schema cannot be carried out; what else is not.

    `places` are the fields of the tools' schemas. Raises RequestInvalid for a strict tool that
    asks what cannot be carried out.
    """
    for tool in tools:
        check_bounds(tool.parameters, places[tool.name])
    verdict = _verdict(Grammar(kind="lark", text=call_tail_grammar(tools)))
    loose: list[LooseParameter] = []
    if verdict.problem is not None:
        for tool in tools:
            loose += _loose_of(tool, places[tool.name])
        verdict = _verdict(Grammar(kind="lark", text=call_tail_grammar(tools, loose=loose)))
    if verdict.problem is not None:
        _refuse("tools", "", verdict.problem, code="invalid_tools")
    gaps: tuple[SchemaGap, ...] = ()
    for tool in tools:
        names = [parameter.name for parameter in loose if parameter.tool == tool.name]
        found = tool_gaps(tool, names, verdict, places[tool.name])
        if found and tool.strict is True:
            keyword = found[0].keyword or "its schema"
            _refuse(found[0].path, "", f"{keyword} is not supported here", code="invalid_tools")
        gaps += found
    return loose, gaps


def _loose_of(tool: ToolSpec, place: str) -> list[LooseParameter]:
    """Parameters whose grammar does not compile. Raises RequestInvalid for one of a strict tool."""
    loose = []
    properties = tool.parameters.get("properties")
    for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
        strict = tool.strict is True
        if takes_text(schema, tool.parameters):
            terminal = text_bounds(schema, tool.parameters).terminal
            if terminal is None:
                continue
            problem = _verdict(Grammar(kind="lark", text=f"start: TEXT\nTEXT: {terminal}")).problem
        else:
            document = parameter_schema(schema, tool.parameters, strict=strict)
            problem = _verdict(json_grammar(document)).problem
        if problem is None:
            continue
        if strict:
            _refuse(place, f"/properties/{name}", problem, code="invalid_tools")
        loose.append(LooseParameter(tool.name, name))
    return loose


def _culprit(schema: Mapping[str, Any], problem: str, *, strict: bool) -> tuple[str, str]:
    """The innermost part of a schema that has the problem by itself: its pointer and problem."""
    kept = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    place = ""
    for below, node, _ in walk(schema):
        if not below.startswith(place) or not below:
            continue
        document = parameter_schema(node, kept, strict=strict)
        found = _verdict(json_grammar(document)).problem
        if found is not None and "does not exist" not in found:
            place, problem = below, found
    return place, problem


def _refuse(param: str, place: str, problem: str, *, code: str) -> NoReturn:
    where = f"{param}{place.replace('/', '.')}"
    raise RequestInvalid(f"{where} cannot be carried out: {problem}.", param=where, code=code)
