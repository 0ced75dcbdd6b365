"""JSON schemas of requests: bounded, closed, and spelled for the grammar engine.

Bounds are those of OpenAI's structured outputs. An object that lists properties and says nothing of
others is closed: what a model writes then still satisfies the schema as it was given, and a model
has no reason to invent properties.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from civetta.errors import RequestInvalid
from civetta.types import Grammar

SCHEMA_BYTES_MAX = 2 * 1024 * 1024
PROPERTIES_MAX = 5000
OPTIONAL_MAX = 500
"""Properties of one object that may be left out: what may follow grows with them."""
ENUM_VALUES_MAX = 1000
NAME_CHARS_MAX = 120_000
DEPTH_MAX = 64
REPEATS_MAX = 100_000
"""Largest length or count that a schema may ask for."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "unevaluatedProperties", "contains", "not",
    "if", "then", "else", "propertyNames",
)  # fmt: skip
_LEAVES_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip

PRETTY = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,64})"}
"""Free layout: one blank or line end with its indentation between tokens, so that it ends."""
AS_RENDERED = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}
"""The one spelling in which the chat template writes values of earlier calls."""


def schema_grammar(
    schema: Mapping[str, Any],
    *,
    strict: bool,
    param: str,
    layout: Mapping[str, Any] = PRETTY,
) -> Grammar:
    """The texts that are JSON of this schema.

    Without `strict`, keywords that cannot be carried out are ignored. Raises RequestInvalid with
    code `invalid_schema` for a schema out of bounds; whether it can be met is for the grammar's
    compiler to say.
    """
    check_bounds(schema, param)
    return Grammar(kind="json_schema", text=json.dumps(with_layout(schema, layout, strict=strict)))


def with_layout(
    schema: Mapping[str, Any], layout: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """A closed copy of the schema with the engine's own options."""
    guidance = {**layout, "lenient": not strict, "coerce_one_of": not strict}
    return {**closed(schema), "x-guidance": guidance}


def check_bounds(schema: Mapping[str, Any], param: str) -> None:
    """Raise RequestInvalid, naming the place, for a schema that is too large or nests too deeply."""
    if len(json.dumps(schema)) > SCHEMA_BYTES_MAX:
        _refuse(param, "", f"is larger than {SCHEMA_BYTES_MAX} bytes")
    n_properties = n_chars = 0
    for place, node, depth in walk(schema):
        if depth > DEPTH_MAX:
            _refuse(param, place, f"nests deeper than {DEPTH_MAX} levels")
        if _n_optional(node) > OPTIONAL_MAX:
            _refuse(param, place, f"has more than {OPTIONAL_MAX} properties that are not required")
        names = [*_mapping(node.get("properties")), *_mapping(node.get("$defs"))]
        n_properties += len(names)
        n_chars += sum(map(len, names))
        values = node.get("enum")
        if isinstance(values, list):
            if len(values) > ENUM_VALUES_MAX:
                _refuse(param, f"{place}/enum", f"has more than {ENUM_VALUES_MAX} values")
            n_chars += sum(len(value) for value in values if isinstance(value, str))
        for key in _COUNTS:
            count = node.get(key)
            if isinstance(count, (int, float)) and count > REPEATS_MAX:
                _refuse(param, f"{place}/{key}", f"is above {REPEATS_MAX}")
        if n_properties > PROPERTIES_MAX:
            _refuse(param, place, f"is one too many: {PROPERTIES_MAX} properties are the most")
        if n_chars > NAME_CHARS_MAX:
            _refuse(
                param,
                place,
                f"is one too many: {NAME_CHARS_MAX} characters of names and enum values are the"
                " most",
            )


def closed(schema: Any) -> Any:
    """A copy in which objects that list properties admit no others, unless they say so."""
    if not isinstance(schema, Mapping):
        return schema
    copy = dict(schema)
    for key in _NAMED:
        if isinstance(copy.get(key), Mapping):
            copy[key] = {name: closed(below) for name, below in copy[key].items()}
    for key in _LISTS:
        if isinstance(copy.get(key), list):
            copy[key] = [closed(below) for below in copy[key]]
    for key in _SINGLE:
        if key in copy:
            copy[key] = closed(copy[key])
    combined = any(key in copy for key in ("allOf", "anyOf", "oneOf", "$ref"))
    if "properties" in copy and not combined and not any(key in copy for key in _LEAVES_OPEN):
        copy["additionalProperties"] = False
    if "allOf" in copy:  # branches that close themselves would refuse each other's properties
        copy["allOf"] = schema["allOf"]
    return copy


def walk(
    schema: Any, place: str = "", depth: int = 1
) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Every schema object within `schema`: JSON pointer, object, depth; outer ones first.

    Objects beyond DEPTH_MAX + 1 are left out.
    """
    if not isinstance(schema, Mapping) or depth > DEPTH_MAX + 1:
        return
    yield place, schema, depth
    for key in _NAMED:
        for name, below in _mapping(schema.get(key)).items():
            yield from walk(below, f"{place}/{key}/{name}", depth + 1)
    for key in _LISTS:
        for index, below in enumerate(schema[key] if isinstance(schema.get(key), list) else ()):
            yield from walk(below, f"{place}/{key}/{index}", depth + 1)
    for key in _SINGLE:
        if key in schema:
            yield from walk(schema[key], f"{place}/{key}", depth + 1)


def _n_optional(node: Mapping[str, Any]) -> int:
    properties, required = _mapping(node.get("properties")), node.get("required")
    needed = required if isinstance(required, list) else []
    return len(properties) - sum(key in properties for key in needed if isinstance(key, str))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _refuse(param: str, place: str, why: str) -> None:
    raise RequestInvalid(
        f"The schema's {place or 'root'} {why}: simplify it.",
        param=f"{param}{place.replace('/', '.')}",
        code="invalid_schema",
    )
