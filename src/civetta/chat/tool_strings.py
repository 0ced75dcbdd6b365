"""What a tool's schema asks of a parameter that is bare text, as one term of a Lark terminal.

A string inside an array or an object is JSON, and the grammar engine knows its keywords. A
parameter that may be a string itself is written without quotes, so what is asked of it is said
here: `pattern`, lengths, `format`, `enum`, `const`, joined by `anyOf`, `allOf` and `$ref`. Where
other types than string are admitted as well, their JSON is read as them (`chat/coerce.py`), so that
no string may look like it. A pattern of JSON schema matches anywhere in the text unless it has
anchors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from civetta.chat.coerce import admitted_types, referenced
from civetta.chat.json_text import json_text
from civetta.chat.text_formats import FORMATS
from civetta.chat.text_patterns import anywhere, literal, term

_END = r"(?s:.*)<\/parameter>\n(<parameter=|<\/function>\n<\/tool_call>)(?s:.*)"
_NODES_MAX = 500
"""Schemas that one parameter's term is made of; a reference counts each time it is followed."""
_UNHEEDED = ("not", "if", "then", "else")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ASKED_OF_STRINGS = ("pattern", "minLength", "maxLength", "format")
_BOUNDS = (
    *ASKED_OF_STRINGS, "enum", "const", *_OF_NUMBERS, *_UNHEEDED,
    "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains",
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties",
)  # fmt: skip
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_SAID = {
    "null": "null",
    "boolean": "(true|false)",
    "integer": r"-?(0|[1-9][0-9]*)",
    "number": _NUMBER,
}
"""JSON of the types that a text may be instead of a string, as it is written in a call."""
_READ = {**_SAID, "integer": _NUMBER}
"""JSON that is read as such a type; 5.0 is an integer."""
_BLANKS = r"[ \t\r\n]*"


@dataclass(frozen=True, slots=True)
class TextBounds:
    """The texts that a parameter may be: a terminal's body, None when any text will do.

    `unheeded` are keywords that are not carried out, as (JSON pointer of their schema, keyword);
    with an empty keyword it is the whole schema.
    """

    terminal: str | None
    unheeded: tuple[tuple[str, str], ...] = ()


def listed_texts(schema: object) -> list[str] | None:
    """The values that a schema lists (`const`, `enum`), as a call writes them; None for no list."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    texts = (value if isinstance(value, str) else json_text(value) for value in values)
    return list(dict.fromkeys(texts))


def text_bounds(schema: object, root: Mapping[str, Any], place: str = "") -> TextBounds:
    """What is asked of the text of a parameter with this schema, which stands at `place` of `root`.

    The terminal's body is a line end, then texts that fit and do not hold what ends a value.
    Whether a pattern is one that can be carried out is for the grammar's compiler to say.
    """
    reader = _Bounds(root, admitted_types(schema, root))
    try:
        expression = reader.expression(schema, place)
    except _TooLarge:
        return TextBounds(None, ((place, ""),))
    unheeded = tuple(dict.fromkeys(reader.unheeded))
    if expression is None or not reader.bounded:
        return TextBounds(None, unheeded)
    return TextBounds(rf"/\n(?s:.*)/ & {expression} & ~/{_END}/", unheeded)


class _TooLarge(Exception):
    """The schema has more than _NODES_MAX parts."""


class _Bounds:
    """Reads one parameter's schema; `types` are all that the parameter admits."""

    def __init__(self, root: Mapping[str, Any], types: frozenset[str]) -> None:
        self._root, self._types = root, types
        self._others = sorted(types - {"string"})
        self._regular = all(kind in _SAID for kind in self._others)  # no arrays, no objects
        self._within: list[str] = []
        self._nodes = 0
        self.unheeded: list[tuple[str, str]] = []
        self.bounded = False  # whether anything is asked of a string

    def expression(self, schema: object, place: str) -> str | None:
        """A term of texts behind a line end; None for all of them."""
        self._nodes += 1
        if self._nodes > _NODES_MAX:
            raise _TooLarge
        if not isinstance(schema, Mapping):
            return None
        if not self._regular:
            self._give_up(schema, place)
            return None
        self.unheeded += [(place, key) for key in _UNHEEDED if key in schema]
        terms = [self._own(schema, place), self._referenced(schema, place)]
        terms += [self._either(schema, key, place) for key in ("anyOf", "oneOf")]
        branches = _list(schema, "allOf")
        terms += [
            self.expression(branch, f"{place}/allOf/{index}")
            for index, branch in enumerate(branches)
        ]
        known = [each for each in terms if each is not None]
        return _joined(" & ", known) if known else None

    def _own(self, schema: Mapping[str, Any], place: str) -> str | None:
        """What the schema's own keywords ask."""
        own = self._types
        if "type" in schema:
            own = admitted_types({"type": schema["type"], "nullable": schema.get("nullable")}, {})
            own = own & self._types or self._types
        if own & {"integer", "number"}:
            self.unheeded += [(place, key) for key in _OF_NUMBERS if key in schema]
        terms = self._strings(schema, place) if "string" in own else []
        choices = _choices(schema)
        self.bounded |= bool(terms) or choices is not None
        if not terms and own >= self._types:
            return choices
        kinds = [term(_SAID[kind]) for kind in sorted(own - {"string"})]
        if "string" in own:
            read = [f"~{term(_BLANKS + _READ[kind] + _BLANKS)}" for kind in self._others]
            kinds.append(_joined(" & ", [*terms, *read]))
        both = [_joined(" | ", kinds), *([] if choices is None else [choices])]
        return _joined(" & ", both)

    def _strings(self, schema: Mapping[str, Any], place: str) -> list[str]:
        """Terms that a string has to fit."""
        terms = []
        pattern, form = schema.get("pattern"), schema.get("format")
        if isinstance(pattern, str):
            terms.append(anywhere(pattern))
        least, most = _count(schema.get("minLength")), _count(schema.get("maxLength"))
        if least or most is not None:
            terms.append(term(f"(?s:.{{{least or 0},{'' if most is None else most}}})"))
        if isinstance(form, str) and form in FORMATS:
            terms.append(term(FORMATS[form]))
        elif form is not None:
            self.unheeded.append((place, "format"))
        return terms

    def _referenced(self, schema: Mapping[str, Any], place: str) -> str | None:
        if "$ref" not in schema:
            return None
        reference = schema["$ref"]
        target = referenced(reference, self._root) if isinstance(reference, str) else None
        if not isinstance(target, Mapping) or reference in self._within:
            self.unheeded.append((place, "$ref"))
            return None
        self._within.append(reference)
        try:
            return self.expression(target, reference[1:])
        finally:
            self._within.pop()

    def _either(self, schema: Mapping[str, Any], key: str, place: str) -> str | None:
        branches = _list(schema, key)
        if not branches:
            return None
        if key == "oneOf" and not self._apart(branches):
            self.unheeded.append((place, key))  # read as anyOf
        found = [
            self.expression(branch, f"{place}/{key}/{index}")
            for index, branch in enumerate(branches)
        ]
        whole = [each for each in found if each is not None]
        return _joined(" | ", whole) if len(whole) == len(found) else None

    def _apart(self, branches: list[Any]) -> bool:
        """Whether no value can be of two branches."""
        if len(branches) > len(_SAID) + 1:
            return False  # there are fewer types
        types = [admitted_types(branch, self._root) for branch in branches]
        return not any(one & other for one, other in combinations(types, 2))

    def _give_up(self, schema: Mapping[str, Any], place: str) -> None:
        """Name what is asked where arrays or objects are admitted too: no terminal knows these."""
        self.unheeded += [(place, key) for key in _BOUNDS if key in schema]
        for key in ("anyOf", "oneOf", "allOf"):
            for index, branch in enumerate(_list(schema, key)):
                self.expression(branch, f"{place}/{key}/{index}")
        self._referenced(schema, place)


def _joined(sign: str, parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({sign.join(parts)})"


def _choices(schema: Mapping[str, Any]) -> str | None:
    texts = listed_texts(schema)
    return None if texts is None else _joined(" | ", [literal(text) for text in texts])


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value >= 0 else None
