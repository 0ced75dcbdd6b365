"""Raw parameter text of a tool call to the JSON value that the tool's schema asks for.

The model writes strings bare and everything else as JSON (model.md A.10), so the schema decides
what a text like `5` is. Where several types are admitted the typed readings come before the string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from civetta.chat.json_text import SpelledFloat, parsed_float, read_json

_ALL = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_DEPTH_MAX = 64


def coerce(text: str, schema: object, root: Mapping[str, Any]) -> Any:
    """`text` as the JSON value that `schema` admits; the text itself when nothing else fits.

    `root` is the schema that local references (`#/$defs/...`) point into. A value of a wrong type
    is left to the tool to refuse, because only it can say what it wanted. Never raises.
    """
    types = admitted_types(schema, root)
    if types == {"string"}:
        return text
    allowed = schema.get("enum") if isinstance(schema, Mapping) else None
    value = _typed(text, types)
    if value is not None or (text.strip() == "null" and "null" in types):
        if "string" not in types or not isinstance(allowed, list) or value in allowed:
            return value
        return text
    if "string" in types:
        return text
    return _lenient(text.strip(), types, text)


def admitted_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types a schema admits; "number" includes "integer". Everything when it is silent."""
    return _Admission(root).types_of(schema, 0)


class _Admission:
    """Reads types out of one schema; each reference is followed once, so that cycles end."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[object, frozenset[str]] = {}

    def types_of(self, schema: object, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
            return _ALL
        types = _ALL
        if "$ref" in schema:
            types &= self._referenced(schema["$ref"], depth)
        if "type" in schema:
            declared = schema["type"]
            names = declared if isinstance(declared, list) else [declared]
            types &= _widened({name for name in names if isinstance(name, str)})
        if "const" in schema:
            types &= _widened({_type_of(schema["const"])})
        if isinstance(schema.get("enum"), list):
            types &= _widened({_type_of(value) for value in schema["enum"]})
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                branches = [self.types_of(branch, depth + 1) for branch in schema[key]]
                types &= frozenset[str]().union(*branches)
        for branch in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            types &= self.types_of(branch, depth + 1)
        if schema.get("nullable") is True:
            types |= {"null"}
        return types or frozenset({"string"})

    def _referenced(self, reference: object, depth: int) -> frozenset[str]:
        if not isinstance(reference, str):
            return _ALL
        if reference not in self._known:
            self._known[reference] = _ALL  # what a cycle back to it reads
            self._known[reference] = self.types_of(referenced(reference, self._root), depth + 1)
        return self._known[reference]


def parse_json(text: str) -> Any:
    """The JSON value of `text`, or raises ValueError, also for what JSON text cannot carry again:
    NaN, infinities, numbers out of range and lone surrogates."""
    try:
        value = read_json(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def referenced(reference: str, root: Mapping[str, Any]) -> object:
    """What a reference within `root` (`#/$defs/...`) points to; None for nothing."""
    if not reference.startswith("#"):
        return None
    target: object = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


def _typed(text: str, types: frozenset[str]) -> Any:
    # the value when the text is JSON of an admitted type; None otherwise
    try:
        value = parse_json(text)
    except ValueError:
        return None
    if isinstance(value, str):  # strings are written bare, so quotes are part of the text
        return None if "string" in types else _typed(value, types)
    if isinstance(value, float) and "number" not in types and value.is_integer():
        value = int(value)
    return value if _type_of(value) in types else None


def _lenient(text: str, types: frozenset[str], raw: str) -> Any:
    lowered = text.lower()
    if "boolean" in types and lowered in ("true", "false"):
        return lowered == "true"
    if "null" in types and lowered == "none":
        return None
    try:
        if "integer" in types and text.lstrip("+-").isdecimal():
            return int(text)
        if "number" in types:
            return float(parsed_float(text))  # not JSON, so not in its own spelling
    except ValueError:
        pass
    return raw


def _type_of(value: object) -> str:
    kinds: dict[type, str] = {
        bool: "boolean", int: "integer", float: "number", SpelledFloat: "number", str: "string",
        type(None): "null",
    }  # fmt: skip
    return kinds.get(type(value), "object" if isinstance(value, Mapping) else "array")


def _widened(names: set[str]) -> frozenset[str]:
    known = frozenset(names) & _ALL
    if not known:  # a type this reader does not know says nothing
        return _ALL
    return known | {"integer"} if "number" in known else known
