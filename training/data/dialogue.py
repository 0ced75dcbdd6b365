"""Turns questions and answers into the messages of a conversation, with the usual variations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.data import lexicon
from training.data.sample import Chat, Message, ToolSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from training.data.draw import Draw

SYSTEM_CHANCE = 0.3
THINKING_CHANCE = 0.4
EFFORT_CHANCE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One user message and the reply to it; `reasoning` is what goes into the thinking block."""

    user: str | list[dict[str, Any]]
    answer: str
    reasoning: str


def assistant(content: str, reasoning: str, *, thinking: bool) -> Message:
    """Return an assistant message; without thinking the template writes an empty block."""
    message: Message = {"role": "assistant", "content": content}
    if thinking:
        message["reasoning_content"] = reasoning
    return message


def wants_thinking(draw: Draw) -> bool:
    """Decide whether the conversation is held with thinking on."""
    return draw.chance(THINKING_CHANCE) if draw.thinking is None else draw.thinking


def opening(draw: Draw) -> list[Message]:
    """Return a system message or none."""
    if draw.single or not draw.chance(SYSTEM_CHANCE):
        return []
    return [{"role": "system", "content": draw.choice(lexicon.lines("systems"))}]


def effort(draw: Draw, *, thinking: bool) -> str | None:
    """Return a reasoning effort other than the default, now and then."""
    if thinking and not draw.single and draw.chance(EFFORT_CHANCE):
        return draw.choice(("low", "medium"))
    return None


def chat(
    draw: Draw,
    ability: str,
    key: str,
    turns: Sequence[Turn],
    *,
    tools: list[ToolSpec] | None = None,
    images: tuple[np.ndarray, ...] = (),
    cells: tuple[np.ndarray, ...] = (),
) -> Chat:
    """Build a conversation of plain turns."""
    thinking = wants_thinking(draw)
    messages = opening(draw)
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append(assistant(turn.answer, turn.reasoning, thinking=thinking))
    return Chat(
        ability=ability,
        key=key,
        messages=messages,
        tools=tools,
        enable_thinking=thinking,
        effort=effort(draw, thinking=thinking),
        images=images,
        cells=cells,
    )
