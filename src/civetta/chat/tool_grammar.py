"""Tool calls as a grammar: names among the declared ones, values by their schemas.

What is allowed is what the chat template writes for an earlier call, and nothing else, so that a
call that is sent back renders to the tokens it was sampled as. Parameters come in any order, each
once, the required ones before the call ends. Strings are bare text up to the first place where the
syntax goes on behind `</parameter>`; everything else is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from civetta.chat.coerce import admitted_types
from civetta.chat.schema import AS_RENDERED, with_layout
from civetta.chat.tool_strings import listed_texts, text_bounds
from civetta.chat.tools import CALL_CLOSE, CALL_OPEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from civetta.chat.message import ToolSpec
    from civetta.types import Grammar

COUNTED_PARAMETERS = 60
"""Parameters of a tool that are held to come once; those behind may come again."""

_MORE = "\n</parameter>\n<parameter="
_LAST = f"\n</parameter>\n</function>\n{CALL_CLOSE}"
_RULES = r"""
NUMBER: /-?(0|[1-9][0-9]{0,14})(\.([0-9]{0,5}[1-9]|0))?/
INTEGER: /0|-?[1-9][0-9]*/
KEY: /[A-Za-z_][\w.-]*/
TEXT: /\n(?s:.*)/ & ~/(?s:.*)<\/parameter>\n(<parameter=|<\/function>\n<\/tool_call>)(?s:.*)/
text_more[lazy]: TEXT "</parameter>\n<parameter="
text_last[lazy]: TEXT "</parameter>\n</function>\n</tool_call>"
"""


@dataclass(frozen=True, slots=True)
class LooseParameter:
    """A parameter whose schema cannot be carried out: any JSON will do."""

    tool: str
    name: str


def calls_grammar(
    tools: Sequence[ToolSpec],
    *,
    many: bool,
    loose: Iterable[LooseParameter] = (),
    otherwise: Grammar | None = None,
) -> str:
    """Lark for an answer that is one call, or several with `many`, or a text of `otherwise`."""
    call = f"{_quoted(CALL_OPEN)} tail"
    calls = f'{call} ("\\n" {call})*' if many else call
    start = f"start: {calls}" + ("" if otherwise is None else f" | {_inline(otherwise)}")
    return f"{start}\n{_tail(tools, loose)}"


def call_tail_grammar(tools: Sequence[ToolSpec], *, loose: Iterable[LooseParameter] = ()) -> str:
    """Lark for the rest of a call, behind `<tool_call>`."""
    return f"start: tail\n{_tail(tools, loose)}"


def parameter_schema(schema: object, root: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """The schema of one parameter as a document of its own, with what it refers to."""
    kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
    own = dict(schema) if isinstance(schema, Mapping) else {}
    return with_layout({**kept, **own}, AS_RENDERED, strict=strict)


def takes_text(schema: object, root: Mapping[str, Any]) -> bool:
    """Whether the parameter is written as bare text."""
    return listed_texts(schema) is None and "string" in admitted_types(schema, root)


def lists_values(schema: object) -> bool:
    """Whether the parameter is written as one of the values that its schema lists."""
    return listed_texts(schema) is not None


def is_key(key: object) -> bool:
    """Whether the syntax can name the parameter."""
    return isinstance(key, str) and key == key.strip() != "" and not set(key) & set("<>\n\r")


def _tail(tools: Sequence[ToolSpec], loose: Iterable[LooseParameter]) -> str:
    names = " | ".join(f"t{index}" for index in range(len(tools)))
    known = frozenset(loose)
    rules = [f'tail: "\\n<function=" ({names})']
    for index, tool in enumerate(tools):
        rules += _Tool(tool, f"t{index}", known).rules()
    return "\n".join(rules) + _RULES


class _Tool:
    """The rules of one tool; `label` begins their names.

    Bits of the rules' parameter say which parameters were given, required ones in the low bits.
    """

    def __init__(self, tool: ToolSpec, label: str, loose: frozenset[LooseParameter]) -> None:
        self._tool, self._label, self._loose = tool, label, loose
        root = self._root = tool.parameters
        properties = root.get("properties")
        declared = dict(properties) if isinstance(properties, Mapping) else {}
        required = root.get("required")
        needed = [k for k in required if k in declared] if isinstance(required, list) else []
        needed = [key for key in dict.fromkeys(needed) if is_key(key)]
        others = [key for key in declared if key not in needed and is_key(key)]
        self._keys = [*needed, *others]
        self._declared = declared
        self._needed = min(len(needed), COUNTED_PARAMETERS)
        self._counted = min(len(self._keys), COUNTED_PARAMETERS)
        extra = root.get("additionalProperties", root.get("patternProperties"))
        self._extra = extra is not None and extra is not False
        self._extra_schema = root.get("additionalProperties")

    def rules(self) -> list[str]:
        label = self._label
        bare = _quoted(f"{self._tool.name}>\n</function>\n{CALL_CLOSE}")
        if not self._keys and not self._extra:
            return [f"{label}: {bare}"]
        first = _quoted(f"{self._tool.name}>\n<parameter=")
        start = f"{label}: {first} {label}_more::0x0"
        rules = [start if self._needed else f"{start} | {bare}"]
        options = []
        for index, key in enumerate(self._keys):
            if index < self._counted:
                options.append(f"{label}_p{index}::set_bit({index}) %if bit_clear({index})")
            else:
                options.append(f"{label}_p{index}::_")
            schema = self._declared[key]
            rules += self._parameter(f"p{index}", _quoted(f"{key}>"), schema, key)
        if self._extra:
            options.append(f"{label}_px::_")
            schema = self._extra_schema if isinstance(self._extra_schema, Mapping) else {}
            taken = "".join(f" & ~{_quoted(key)}" for key in self._keys)
            rules.append(f"{label.upper()}_KEY: KEY{taken}")
            rules += self._parameter("px", f'{label.upper()}_KEY ">"', schema, None)
        rules.append(f"{label}_more::_: " + " | ".join(options))
        return rules

    def _parameter(self, name: str, head: str, schema: object, key: str | None) -> list[str]:
        label = f"{self._label}_{name}"
        more, last = f"{self._label}_more::_", self._may_end()
        if takes_text(schema, self._root):
            terminal = None if self._is_loose(key) else text_bounds(schema, self._root).terminal
            if terminal is not None:
                return self._bounded_text(label, head, terminal)
            return [
                f"{label}::_: {head} text_more {more}{self._may_go_on()} | {head} text_last{last}"
            ]
        value = f"{label}_v"
        return [
            f'{label}::_: {head} "\\n" {value} {_quoted(_MORE)} {more}{self._may_go_on()}'
            f' | {head} "\\n" {value} {_quoted(_LAST)}{last}',
            f"{value}: {self._value(schema, key)}",
        ]

    def _is_loose(self, key: str | None) -> bool:
        return key is not None and LooseParameter(self._tool.name, key) in self._loose

    def _bounded_text(self, label: str, head: str, terminal: str) -> list[str]:
        """The rules of a text of which something is asked."""
        more, last = f"{self._label}_more::_", self._may_end()
        text = f"{label.upper()}_TEXT"
        return [
            f"{label}::_: {head} {label}_m {more}{self._may_go_on()} | {head} {label}_l{last}",
            f"{label}_m[lazy]: {text} {_quoted(_MORE)}",
            f"{label}_l[lazy]: {text} {_quoted(_LAST)}",
            f"{text}: {terminal}",
        ]

    def _may_end(self) -> str:
        return f" %if is_ones([0:{self._needed}])" if self._needed else ""

    def _may_go_on(self) -> str:
        if self._extra or len(self._keys) > self._counted:
            return ""
        return f" %if not(is_ones([0:{self._counted}]))"

    def _value(self, schema: object, key: str | None) -> str:
        texts = listed_texts(schema)
        if texts is not None:
            return " | ".join(map(_quoted, texts))
        types = admitted_types(schema, self._root)
        if self._is_loose(key):
            schema = {"type": sorted(types)}
        elif isinstance(schema, Mapping) and set(schema) <= {
            "type",
            "description",
            "default",
            "title",
        }:
            if types == {"integer"}:
                return "INTEGER"
            if types == {"integer", "number"}:
                return "NUMBER"
        document = parameter_schema(schema, self._root, strict=self._tool.strict is True)
        return f"%json {json.dumps(document)}"


def _inline(grammar: Grammar) -> str:
    assert grammar.kind in ("json_schema", "regex"), "a Lark grammar has rules of its own"
    if grammar.kind == "json_schema":
        return f"%json {grammar.text}"
    return "/" + grammar.text.replace("/", "\\/") + "/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
