"""The model's own tool-call syntax, written and read (model.md A.10).

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Nothing is escaped, so a value may hold these tags as text. A closing tag therefore closes only
where the grammar goes on behind it: `</parameter>` before another opening or a closing tag,
`</function>` inside a value only before `</tool_call>`, another function or the end of the text.
What models get wrong (missing `>`, missing closing tags, stray characters in a name) is repaired
when the tool's schema says how, and dropped otherwise; the text is never shown as content.

A call that a grammar bound (tool_grammar.py) needs no repair. It is read `exact`ly: a value ends
where the template's own text goes on, and there alone, so that any other markup in it is value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from civetta.chat.coerce import coerce
from civetta.chat.json_text import json_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from civetta.chat.message import ToolSpec

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_OPEN, _FUNCTION_CLOSE = "<function=", "</function>"
_PARAMETER_OPEN, _PARAMETER_CLOSE = "<parameter=", "</parameter>"
_TAG_CHARS_MAX = len(_PARAMETER_CLOSE)
_HEADER_END = re.compile(r"[>\n<]")
_NOT_SPACE = re.compile(r"\S")
_KEY_AND_REST = re.compile(r"[\"']?([\w.-]+)[\"']?[ \t]*(?:[:=][ \t]*(.*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One complete call; the arguments have the types of the tool's schema."""

    name: str
    arguments: dict[str, Any]


def render_call(name: str, arguments: Mapping[str, Any]) -> str:
    """One call byte for byte as the template writes history: strings bare, the rest as JSON."""
    parameters = "".join(
        f"{_PARAMETER_OPEN}{key}>\n{value if isinstance(value, str) else json_text(value)}\n"
        f"{_PARAMETER_CLOSE}\n"
        for key, value in arguments.items()
    )
    return f"{CALL_OPEN}\n{_FUNCTION_OPEN}{name}>\n{parameters}{_FUNCTION_CLOSE}\n{CALL_CLOSE}"


def parse_block(text: str, tools: Iterable[ToolSpec]) -> list[ParsedCall]:
    """The calls in the text that follows one `<tool_call>`."""
    reader = BlockReader(tools)
    return [*reader.push(text), *reader.finish()]


class _State(Enum):
    OUTSIDE = auto()  # in the block, in no function
    NAME = auto()
    BODY = auto()  # in a function, between parameters
    KEY = auto()
    VALUE = auto()
    CLOSED = auto()


_TAGS = {
    _State.OUTSIDE: (_FUNCTION_OPEN, CALL_CLOSE),
    _State.BODY: (_PARAMETER_OPEN, _FUNCTION_CLOSE, _FUNCTION_OPEN, CALL_CLOSE),
    _State.VALUE: (_PARAMETER_CLOSE, _FUNCTION_CLOSE, CALL_CLOSE, _PARAMETER_OPEN),
}
_BEHIND = {  # closing tag inside a value: what must follow it, and whether the end of text will do
    _PARAMETER_CLOSE: (("<parameter", _FUNCTION_CLOSE, CALL_CLOSE, _FUNCTION_OPEN), False),
    _FUNCTION_CLOSE: ((CALL_CLOSE, _FUNCTION_OPEN), True),
    CALL_CLOSE: ((CALL_OPEN,), True),
}


_GOES_ON = (f"\n{_PARAMETER_OPEN}", f"\n{_FUNCTION_CLOSE}\n{CALL_CLOSE}")


class BlockReader:
    """Reads what follows one `<tool_call>`, in pieces of any size, with the same result for all.

    A call is returned when its function is complete; an incomplete one is never returned. When
    `closed`, `rest` is the text behind `</tool_call>`. `exact`: the text is of the calls' grammar.
    """

    def __init__(self, tools: Iterable[ToolSpec], *, exact: bool = False) -> None:
        self._exact = exact
        self._tools = {tool.name: tool for tool in tools}
        self._text = ""
        self._at = 0  # all before it is decided
        self._state = _State.OUTSIDE
        self._final = False
        self._name = ""
        self._key = ""
        self._value_head = ""
        self._value: list[str] = []  # decided text of the present value; more is in _text
        self._raw: dict[str, str] = {}
        self._calls: list[ParsedCall] = []

    @property
    def closed(self) -> bool:
        """Whether `</tool_call>` was read."""
        return self._state is _State.CLOSED

    @property
    def rest(self) -> str:
        """The text behind the block; "" until it is closed."""
        return self._text[self._at :] if self.closed else ""

    def push(self, text: str) -> list[ParsedCall]:
        """The calls that became complete with `text`."""
        self._text += text
        while not self.closed and self._advance():
            pass
        if not self.closed:
            self._forget_decided()
        calls, self._calls = self._calls, []
        return calls

    def finish(self) -> list[ParsedCall]:
        """The calls that the end of the text completes."""
        self._final = True
        return self.push("")

    def _forget_decided(self) -> None:
        # so that a long value costs its length once, not once a token
        if self._state is _State.VALUE and self._at:
            self._value.append(self._text[: self._at])
        self._text, self._at = self._text[self._at :], 0

    def _advance(self) -> bool:
        if self._state is _State.NAME:
            return self._read_name()
        if self._state is _State.KEY:
            return self._read_key()
        found = self._find_tag()
        if found is None:
            return False
        place, tag = found
        if self._state is _State.VALUE:
            closes = self._closes_value(place, tag)
            if closes is None:
                self._at = place
                return False
            if not closes:
                self._at = place + 1
                return True
            self._keep_value(place)
        self._at = place + len(tag)
        self._enter(tag)
        return True

    def _enter(self, tag: str) -> None:
        if tag == _PARAMETER_OPEN:
            self._state = _State.KEY
        elif tag == _PARAMETER_CLOSE:
            self._state = _State.BODY
        else:  # the present function ends, if there is one
            if self._state is not _State.OUTSIDE:
                self._complete_call()
            after = {_FUNCTION_OPEN: _State.NAME, CALL_CLOSE: _State.CLOSED}
            self._state = after.get(tag, _State.OUTSIDE)

    def _find_tag(self) -> tuple[int, str] | None:
        # the next tag of this state; None when the text ends before one is certain
        tags = _TAGS[self._state]
        while (place := self._text.find("<", self._at)) >= 0:
            for tag in tags:
                if self._text.startswith(tag, place):
                    return place, tag
            if self._may_become(place, tags):
                self._at = place
                return None
            self._at = place + 1
        self._at = len(self._text)
        return None

    def _may_become(self, place: int, tags: tuple[str, ...]) -> bool:
        tail = self._text[place : place + _TAG_CHARS_MAX]
        return not self._final and any(tag.startswith(tail) for tag in tags)

    def _closes_value(self, place: int, tag: str) -> bool | None:
        # None: more text is needed to tell
        if self._exact:
            return self._ends_value(place, tag)
        if tag == _PARAMETER_OPEN:
            return self._opens_forgotten(place)
        followers, at_end = _BEHIND[tag]
        word = _NOT_SPACE.search(self._text, place + len(tag))
        behind = self._text[word.start() : word.start() + _TAG_CHARS_MAX] if word else ""
        if behind.startswith(followers):
            return True
        if any(follower.startswith(behind) for follower in followers):  # the text ends too early
            return at_end if self._final else None
        return False

    def _ends_value(self, place: int, tag: str) -> bool | None:
        # as `_closes_value`, for exact text: the template goes on behind `</parameter>`
        if tag != _PARAMETER_CLOSE:
            return False
        behind = self._text[place + len(tag) :]
        if behind.startswith(_GOES_ON):
            return True
        undecided = any(text.startswith(behind) for text in _GOES_ON)
        return None if undecided and not self._final else False

    def _opens_forgotten(self, place: int) -> bool | None:
        # `</parameter>` is missing: a declared parameter not given yet, on a line of its own
        before = self._text[place - 1] if place else "".join(self._value[-1:])[-1:]
        if before not in ("", "\n"):
            return False
        start = place + len(_PARAMETER_OPEN)
        end = _HEADER_END.search(self._text, start)
        if end is None:
            return False if self._final else None
        key = self._text[start : end.start()].strip()
        return end[0] == ">" and key in self._properties() and key not in {*self._raw, self._key}

    def _read_header(self) -> tuple[str, bool] | None:
        # text up to ">", newline or "<", and whether it was ">"; None when the text ends first
        word = _NOT_SPACE.search(self._text, self._at)
        end = _HEADER_END.search(self._text, word.start()) if word else None
        if end is None:
            return None
        header = self._text[self._at : end.start()].strip()
        self._at = end.start() + (end[0] == ">")
        return header, end[0] == ">"

    def _read_name(self) -> bool:
        header = self._read_header()
        if header is None:
            return False
        self._name = header[0] if self._exact else header[0].strip("\"'")
        self._raw = {}
        self._state = _State.BODY
        return True

    def _read_key(self) -> bool:
        header = self._read_header()
        if header is None:
            return False
        self._key, self._value_head = self._repaired(*header)
        self._forget_decided()
        self._value = []
        self._state = _State.VALUE
        return True

    def _repaired(self, header: str, ended: bool) -> tuple[str, str]:
        # the key and what of the header belongs to the value; ("", _) when it is not to be saved
        declared = self._properties()
        if ended and header in declared:
            return header, ""
        match = _KEY_AND_REST.fullmatch(header)
        if match is not None and match[1] in declared:
            return match[1], match[2] or ""
        return (header.strip("\"'").rstrip("=: \t"), "") if ended else ("", "")

    def _keep_value(self, end: int) -> None:
        value = "".join([*self._value, self._text[:end]])
        value = value.removeprefix("\n").removesuffix("\n")  # the template's, not the value's
        if self._value_head:
            value = f"{self._value_head}\n{value}" if value.strip() else self._value_head
        if self._key:
            self._raw[self._key] = value

    def _properties(self) -> Mapping[str, Any]:
        tool = self._tools.get(self._name)
        properties = tool.parameters.get("properties") if tool is not None else None
        return properties if isinstance(properties, dict) else {}

    def _complete_call(self) -> None:
        if not self._name:
            return
        tool = self._tools.get(self._name)
        root = tool.parameters if tool is not None else {}
        others = root.get("additionalProperties")
        properties = self._properties()
        arguments = {
            key: coerce(text, properties.get(key, others), root) for key, text in self._raw.items()
        }
        self._calls.append(ParsedCall(name=self._name, arguments=arguments))
