"""What the schemas of a request ask and a grammar does not hold, place by place.

The grammar engine names keywords and no places, so that every place where such a keyword stands is
named. Of a tool's root only names and the required ones are carried out, by the syntax of calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from civetta.chat.schema import walk
from civetta.chat.tool_grammar import is_key, lists_values, takes_text
from civetta.chat.tool_strings import ASKED_OF_STRINGS, text_bounds
from civetta.types import SchemaGap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from civetta.chat.message import ToolSpec
    from civetta.decode.grammar_text import Verdict

GAPS_MAX = 100
"""Named of one request; what is more is not."""
_ROOT_UNHEEDED = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties",
    "dependentRequired", "dependentSchemas", "dependencies",
)  # fmt: skip


def format_gaps(schema: Mapping[str, Any], verdict: Verdict, param: str) -> tuple[SchemaGap, ...]:
    """Of an answer's schema, which is the field `param`."""
    return _gaps(param, _passed_over(schema, "", verdict))


def tool_gaps(
    tool: ToolSpec, loose: Iterable[str], verdict: Verdict, param: str
) -> tuple[SchemaGap, ...]:
    """Of a tool whose parameters are the field `param`; `loose` ones take anything."""
    return _gaps(param, _of_tool(tool.parameters, frozenset(loose), verdict))


def _of_tool(
    root: Mapping[str, Any], loose: frozenset[str], verdict: Verdict
) -> Iterator[tuple[str, str]]:
    yield from (("", key) for key in _ROOT_UNHEEDED if root.get(key) not in (None, {}, []))
    properties = root.get("properties")
    values = False
    for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
        place = f"/properties/{name}"
        if name in loose or not is_key(name):
            yield place, ""
        elif takes_text(schema, root):
            yield from text_bounds(schema, root, place).unheeded
        elif lists_values(schema):
            yield from ((place, key) for key in ASKED_OF_STRINGS if key in schema)
        else:
            values = True
            yield from _passed_over(schema, place, verdict)
    extra = root.get("additionalProperties")
    if isinstance(extra, Mapping):
        if takes_text(extra, root):
            yield from text_bounds(extra, root, "/additionalProperties").unheeded
        else:
            values = True
            yield from _passed_over(extra, "/additionalProperties", verdict)
    if values:
        kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
        yield from _passed_over(kept, "", verdict)


def _passed_over(schema: object, place: str, verdict: Verdict) -> Iterator[tuple[str, str]]:
    if not verdict.keywords and not verdict.formats:
        return
    if "" in verdict.keywords:
        yield place, ""
    for below, node, _ in walk(schema, place):
        yield from ((below, key) for key in node if key in verdict.keywords)
        form = node.get("format")
        if isinstance(form, str) and form in verdict.formats:
            yield below, "format"


def _gaps(param: str, found: Iterable[tuple[str, str]]) -> tuple[SchemaGap, ...]:
    once = list(dict.fromkeys(found))[:GAPS_MAX]
    return tuple(SchemaGap(f"{param}{place.replace('/', '.')}", keyword) for place, keyword in once)
