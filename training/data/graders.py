"""Takes a reply apart and decides whether it is right; one rule an ability."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from training.data.scenes import COLOURS, KINDS

CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>\n(.*?)</function>\s*</tool_call>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", re.DOTALL)
RIVALS: tuple[set[str], ...] = (set(COLOURS), set(KINDS), set("0123456789"))
END_MARKS = ("<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call; argument values compare as text, so 3 and "3" are the same."""

    name: str
    arguments: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> Call:
        """Build a call from arguments of any JSON type, in any order."""
        shown = ((k, v if isinstance(v, str) else json.dumps(v)) for k, v in arguments.items())
        return cls(name=name, arguments=tuple(sorted(shown)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply in parts; a server's client fills it from the fields of its answer."""

    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def parse_reply(text: str, *, thinking: bool) -> Reply:
    """Take apart raw generated text, special tokens kept, as it follows the generation prompt.

    With thinking on, text without `</think>` is all reasoning.
    """
    for mark in END_MARKS:
        text = text.split(mark, maxsplit=1)[0]
    reasoning = ""
    if thinking:
        reasoning, closed, text = text.partition("</think>")
        text = text if closed else ""
    found = tuple(
        Call.of(name.strip(), dict(PARAMETER.findall(body))) for name, body in CALL.findall(text)
    )
    content = text.split("<tool_call>")[0].strip()
    return Reply(content=content, reasoning=reasoning.strip(), calls=found)


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().strip(".!").casefold()


def same_number(reply: Reply, expected: Any) -> bool:
    """Tell whether the last number of the content is the expected one."""
    numbers = re.findall(r"-?\d+", reply.content.replace("\u2212", "-").replace(",", ""))
    return bool(numbers) and numbers[-1] == str(expected)


def contains(reply: Reply, expected: Any) -> bool:
    """Tell whether the content has the expected text as a whole word."""
    return bool(re.search(rf"(?<!\w){re.escape(str(expected))}(?!\w)", reply.content))


def same_text(reply: Reply, expected: Any) -> bool:
    """Tell whether the content is the expected text exactly, but for outer space."""
    return reply.content.strip() == str(expected)


def same_words(reply: Reply, expected: Any) -> bool:
    """Tell whether the content says the same, whatever the case, spaces and last full stop."""
    return _plain(reply.content) == _plain(str(expected))


def same_answer(reply: Reply, expected: Any) -> bool:
    """Tell whether the content has the expected word and no rival of the same sort."""
    rivals = next((group for group in RIVALS if expected in group), {expected})
    return set(re.findall(r"\w+", reply.content.casefold())) & rivals == {expected}


def any_text(reply: Reply, expected: Any) -> bool:
    """Tell whether the content is one of the expected texts."""
    return any(same_words(reply, option) for option in expected)


def same_calls(reply: Reply, expected: Any) -> bool:
    """Tell whether the same tools are called with the same arguments, in the same order."""
    return reply.calls == tuple(expected)


def same_json(reply: Reply, expected: Any) -> bool:
    """Tell whether the content is one JSON object equal to the expected one; types count."""
    try:
        made = json.loads(reply.content)
    except ValueError:
        return False
    return isinstance(made, dict) and json.dumps(made, sort_keys=True) == json.dumps(
        expected, sort_keys=True
    )


def names_in(reply: Reply, expected: Any) -> bool:
    """Tell whether the story is whole sentences and has every expected name."""
    text = reply.content.strip()
    ended = text.endswith((".", "!", "?", '"'))
    return ended and text.count(".") >= 4 and all(name in text for name in expected)


Grader = Callable[[Reply, Any], bool]

GRADERS: dict[str, Grader] = {
    "arithmetic": same_number,
    "retrieval": contains,
    "copy": same_text,
    "vision": same_answer,
    "counting": same_answer,
    "picking": same_answer,
    "tools": same_calls,
    "toolbox": same_calls,
    "json": same_json,
    "definitions": same_words,
    "stories": names_in,
    "chat": any_text,
}
