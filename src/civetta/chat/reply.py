"""Splits the text of a reply into reasoning, content and tool calls while it comes.

What is held back is only what may still become a marker, with the blank text before it, and a call
until it is complete: an interrupted call must not appear, and arguments must always be whole JSON.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from civetta.chat.json_text import json_text
from civetta.chat.message import ToolCall, ToolSpec, parse_json_object
from civetta.chat.number_spelling import with_spellings
from civetta.chat.tools import CALL_CLOSE, CALL_OPEN, BlockReader, ParsedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """More of the thought."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallStart:
    """A call begins; `index` counts the calls of the reply from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolArgumentsDelta:
    """More of the arguments of a call; its fragments joined are one JSON object."""

    index: int
    json_fragment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallEnd:
    """A call is complete."""

    index: int


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole reply; each text is "" when the reply has none of its kind."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def assemble(deltas: Iterable[Delta]) -> Reply:
    """The reply that a stream of deltas adds up to."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: dict[int, ToolCallStart] = {}
    fragments: dict[int, list[str]] = {}
    for delta in deltas:
        match delta:
            case ReasoningDelta():
                reasoning.append(delta.text)
            case ContentDelta():
                content.append(delta.text)
            case ToolCallStart():
                starts[delta.index] = delta
            case ToolArgumentsDelta():
                fragments.setdefault(delta.index, []).append(delta.json_fragment)
            case ToolCallEnd():
                pass
    calls = tuple(
        ToolCall(
            id=start.id,
            name=start.name,
            arguments=parse_json_object("".join(fragments.get(index, [])), "arguments"),
        )
        for index, start in starts.items()
    )
    return Reply(reasoning="".join(reasoning), content="".join(content), tool_calls=calls)


class _State(Enum):
    OPENING = auto()  # nothing but blank text yet: `<think>` may follow
    REASONING = auto()
    LEAD = auto()  # before the first character of content: line ends are dropped
    CONTENT = auto()
    CALL = auto()
    BETWEEN = auto()  # behind a call: blank text waits for what follows


class ReplyParser:
    """Turns the text of one reply into deltas; the text may come in pieces of any size.

    thinking: the prompt left a thought open (`Rendered.opens_thinking`), so the reply begins in it.
    tools: what the model may call; with none, tool-call markers are plain text. parallel: False
    keeps the first call only. exact: calls are texts of their grammar (tool_grammar.py).
    new_id: makes the id of call number `index`; the default is random. Spellings follow it.

    The first `</think>` ends the thought, and every other marker inside it is thought. A thought
    that the reply does not end has no content behind it.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Sequence[ToolSpec] = (),
        parallel: bool = True,
        exact: bool = False,
        new_id: Callable[[int], str] | None = None,
    ) -> None:
        self._tools, self._exact = tuple(tools), exact
        self._calls_max = None if parallel else 1
        self._new_id = new_id or _random_id
        self._state = _State.REASONING if thinking else _State.OPENING
        self._text = ""
        self._final = False
        self._calls = 0
        self._has_content = False
        self._block: BlockReader | None = None
        self._out: list[Delta] = []

    @property
    def in_reasoning(self) -> bool:
        """Whether the text pushed so far ends inside the thought."""
        return self._state is _State.REASONING

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was returned: the finish reason is then `tool_calls`."""
        return self._calls > 0

    def push(self, text: str) -> list[Delta]:
        """The deltas that are certain now."""
        self._text += text
        steps: dict[_State, Callable[[], bool]] = {
            _State.OPENING: self._opening,
            _State.REASONING: self._reasoning,
            _State.LEAD: self._lead,
            _State.CONTENT: self._content,
            _State.CALL: self._call,
            _State.BETWEEN: self._between,
        }
        while steps[self._state]():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Delta]:
        """What was held back; the reply has ended, for whatever reason."""
        self._final = True
        return self.push("")

    # Each step reads from self._text and returns whether the next state can go on at once.

    def _opening(self) -> bool:
        word = self._text.lstrip()
        if word.startswith(THINK_OPEN):
            behind = word[len(THINK_OPEN) :]
            if not behind and not self._final:
                return False
            self._text = behind.removeprefix("\n")  # the template's own line end, not thought
            self._state = _State.REASONING
            return True
        if THINK_OPEN.startswith(word) and not self._final:
            return False
        self._state = _State.LEAD
        return True

    def _reasoning(self) -> bool:
        thought, marker, behind = self._text.partition(THINK_CLOSE)
        if marker:
            self._emit_reasoning(thought.removesuffix("\n"))
            self._text = behind
            self._state = _State.LEAD
            return True
        held = 0 if self._final else _held_back(thought, ("\n" + THINK_CLOSE, THINK_CLOSE))
        self._emit_reasoning(thought[: len(thought) - held])
        self._text = thought[len(thought) - held :]
        return False

    def _lead(self) -> bool:
        self._text = self._text.lstrip("\r\n")
        if not self._text:
            return False
        self._state = _State.CONTENT
        return True

    def _content(self) -> bool:
        if not self._tools:
            self._emit_content(self._text)
            self._text = ""
            return False
        shown, marker, behind = self._text.partition(CALL_OPEN)
        if marker:
            self._emit_content(shown.rstrip())
            self._open_block(behind)
            return True
        certain = shown
        if not self._final:
            certain = shown[: len(shown) - _held_back(shown, (CALL_OPEN,))].rstrip()
        self._emit_content(certain)
        self._text = shown[len(certain) :]
        return False

    def _call(self) -> bool:
        assert self._block is not None
        calls = self._block.push(self._text)
        if self._final:
            calls += self._block.finish()
        self._text = ""
        for call in calls:
            self._emit_call(call)
        if not self._block.closed:
            return False
        self._text = self._block.rest
        self._block = None
        self._state = _State.BETWEEN
        return True

    def _between(self) -> bool:
        word = self._text.lstrip()
        if word.startswith(CALL_OPEN):
            self._open_block(word[len(CALL_OPEN) :])
            return True
        if word.startswith(CALL_CLOSE):  # one too many
            self._text = word[len(CALL_CLOSE) :]
            return True
        undecided = any(marker.startswith(word) for marker in (CALL_OPEN, CALL_CLOSE))
        if not word or (undecided and not self._final):
            return False
        self._state = _State.CONTENT if self._has_content else _State.LEAD
        return True

    def _open_block(self, text: str) -> None:
        self._block = BlockReader(self._tools, exact=self._exact)
        self._text = text
        self._state = _State.CALL

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self._out.append(ReasoningDelta(text=text))

    def _emit_content(self, text: str) -> None:
        if text:
            self._has_content = True
            self._out.append(ContentDelta(text=text))

    def _emit_call(self, call: ParsedCall) -> None:
        if self._calls_max is not None and self._calls >= self._calls_max:
            return
        index = self._calls
        self._calls += 1
        call_id = with_spellings(self._new_id(index), call.arguments)
        self._out.append(ToolCallStart(index=index, id=call_id, name=call.name))
        self._out.append(ToolArgumentsDelta(index=index, json_fragment=json_text(call.arguments)))
        self._out.append(ToolCallEnd(index=index))


def _held_back(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which one of `markers` begins."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def _random_id(_index: int) -> str:
    return f"call_{secrets.token_hex(12)}"
