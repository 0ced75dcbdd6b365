"""Conversations with declared tools: requests, calls, results, answers, and plain talk between."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from training.data import arithmetic, chitchat, definitions, tool_pool
from training.data.dialogue import Turn, assistant, effort, opening, wants_thinking
from training.data.draw import split_of
from training.data.sample import Chat, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from training.data.draw import Draw
    from training.data.tool_pool import Tool, Use

TOKENS_PER_TOOL = 95
PREAMBLE_TOKENS = 250
LINKS = ("{a} {b}", "{a} And {c}", "{a} Then {c}", "{a} Also: {b}", "{a}\n{b}")


def _thought(uses: list[Use]) -> str:
    parts = []
    for use in uses:
        given = ", ".join(f"{k} = {_shown(v)}" for k, v in use.arguments.items())
        parts.append(
            f"I call {use.tool.name} with {given}." if given else f"I call {use.tool.name}."
        )
    return " ".join(parts)


def _shown(item: object) -> str:
    return item if isinstance(item, str) else json.dumps(item)


def _calls(uses: list[Use]) -> list[dict[str, object]]:
    return [
        {"type": "function", "function": {"name": u.tool.name, "arguments": dict(u.arguments)}}
        for u in uses
    ]


def _round(
    draw: Draw, uses: list[Use], *, thinking: bool, last: bool | None = None
) -> list[Message]:
    """One request: user and calls, then results and answer unless it is the last.

    `last` None leaves that to chance; an evaluation item ends with the calls.
    """
    request = uses[0].request
    for use in uses[1:]:
        lowered = use.request[0].lower() + use.request[1:]
        request = draw.choice(LINKS).format(a=request, b=use.request, c=lowered)
    call = assistant("", _thought(uses), thinking=thinking) | {"tool_calls": _calls(uses)}
    messages: list[Message] = [{"role": "user", "content": request}, call]
    if draw.single or (draw.chance(0.35) if last is None else last):
        return messages
    for use in uses:
        messages.append({"role": "tool", "content": json.dumps(use.result, ensure_ascii=False)})
    answer = " ".join(use.answer for use in uses)
    return [*messages, assistant(answer, "I tell the result.", thinking=thinking)]


def _talk(draw: Draw) -> Turn:
    """Small talk that no declared tool could answer."""
    return chitchat.about(draw, draw.choice(("hello", "howareyou", "who", "what", "thanks", "bye")))


def _plain(draw: Draw, *, thinking: bool) -> list[Message]:
    """A question that needs no tool."""
    turn = draw.choice((arithmetic.turn, _talk, definitions.turn))(draw)
    answer = assistant(turn.answer, turn.reasoning, thinking=thinking)
    return [{"role": "user", "content": turn.user}, answer]


def _most(draw: Draw) -> int:
    """How many tools leave room for a call."""
    return max(1, min(8, (draw.room - PREAMBLE_TOKENS) // TOKENS_PER_TOOL))


def _declared(draw: Draw, count: int, make_tool: Callable[[Draw, list[Tool]], Tool]) -> list[Tool]:
    """Tools of different names and purposes, so that every request has one right tool.

    `make_tool` is given those declared so far.
    """
    tools: dict[str, Tool] = {}
    while len(tools) < count:
        tool = make_tool(draw, list(tools.values()))
        if all(tool.purpose != other.purpose for other in tools.values()):
            tools.setdefault(tool.name, tool)
    return list(tools.values())


def _alike(draw: Draw, declared: list[Tool]) -> Tool:
    """A tool hard to guess, two times in five one that shares a word with another."""
    if declared and draw.chance(0.4):
        return tool_pool.neighbour(draw, draw.choice(declared))
    return tool_pool.unusual_tool(draw)


def _parallel(draw: Draw) -> int:
    """How many calls a request asks for: one, now and then two or three."""
    return 1 if draw.single or draw.chance(0.85) else draw.between(2, 3)


def _uses(draw: Draw, tools: list[Tool], count: int) -> list[Use]:
    """What one request asks for."""
    found: list[Use] = []
    while len(found) < count:
        use = tool_pool.use(draw, draw.choice(tools))
        if split_of(f"use {use.request}") == draw.split:
            found.append(use)
    return found


def make(draw: Draw) -> Chat:
    """Return a conversation with one to eight tools; `single` ends at the first call."""
    thinking = wants_thinking(draw)
    most = _most(draw)
    count = most if draw.single else draw.between(1, most)
    tools = _declared(draw, count, lambda draw, _: tool_pool.tool(draw))
    messages = opening(draw)
    count = 1 if draw.single or draw.chance(0.6) else 2
    rounds = [_uses(draw, tools, _parallel(draw)) for _ in range(count)]
    for uses in rounds:
        if not draw.single and draw.chance(0.12):
            messages += _plain(draw, thinking=thinking)
        messages += _round(draw, uses, thinking=thinking)
        if messages[-1].get("tool_calls"):
            break
    return _chat(draw, "tools", tools, rounds, messages, thinking=thinking)


def make_toolbox(draw: Draw) -> Chat:
    """Return up to eight tools with names hard to guess, called one after the other, each once.

    Many calls behind one declaration: the declaration takes most of the tokens. Nearly as many as
    fit are declared, mostly.
    """
    thinking = wants_thinking(draw)
    most = max(2, _most(draw))
    low = max(2, most - 1 if draw.chance(0.75) else most - 4)
    tools = _declared(draw, draw.between(low, most), _alike)
    messages = opening(draw)
    called = draw.rng.sample(tools, 1 if draw.single else len(tools))
    rounds = [_uses(draw, [tool], 1) for tool in called]
    for uses in rounds:
        messages += _round(draw, uses, thinking=thinking, last=uses is rounds[-1])
    return _chat(draw, "toolbox", tools, rounds, messages, thinking=thinking)


def _chat(
    draw: Draw,
    ability: str,
    tools: list[Tool],
    rounds: list[list[Use]],
    messages: list[Message],
    *,
    thinking: bool,
) -> Chat:
    flat = [use for uses in rounds for use in uses]
    return Chat(
        ability=ability,
        key="",
        messages=messages,
        tools=[tool_pool.fit(tool, flat) for tool in tools],
        enable_thinking=thinking,
        effort=effort(draw, thinking=thinking),
    )
