"""Conversations to text, through the renderer that serves: civetta's built-in template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from civetta.chat.builtin import BuiltinTemplate

if TYPE_CHECKING:
    from training.data.sample import Chat, Message, ToolSpec

TEMPLATE = BuiltinTemplate()


def render_messages(
    messages: list[Message],
    tools: list[ToolSpec] | None,
    *,
    enable_thinking: bool,
    effort: str | None = None,
    generation: bool = False,
) -> str:
    """Render a conversation (model.md A.10); `generation` appends the start of the next reply.

    `effort` is a level that the template knows: xhigh (None), medium or low.
    """
    variables: dict[str, Any] = {
        "messages": messages,
        "tools": tools,
        "enable_thinking": enable_thinking,
        "add_generation_prompt": generation,
    }
    if effort is not None:
        variables["reasoning_effort"] = effort
    return TEMPLATE.render(variables)


def render_text(chat: Chat) -> str:
    """Render a whole training conversation."""
    return render_messages(
        chat.messages, chat.tools, enable_thinking=chat.enable_thinking, effort=chat.effort
    )
