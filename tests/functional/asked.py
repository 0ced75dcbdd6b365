"""A served model behind the openai SDK."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.data.graders import Call, Reply

if TYPE_CHECKING:
    import openai
    from training.data.heldout import EvalItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A client with the model it asks."""

    client: openai.OpenAI
    model: str

    def send(self, messages: Any, *, thinking: bool = False, **more: Any) -> Any:
        """One greedy completion, as the SDK returns it."""
        mode = {"chat_template_kwargs": {"enable_thinking": thinking}}
        return self.client.chat.completions.create(
            model=self.model, messages=messages, temperature=0, extra_body=mode, **more
        )

    def reply(self, item: EvalItem) -> Reply:
        """The reply to a held-out item, taken apart."""
        more: dict[str, Any] = {"tools": item.tools} if item.tools else {}
        room = item.max_tokens + (2000 if item.enable_thinking else 0)
        done = self.send(item.messages, thinking=item.enable_thinking, max_tokens=room, **more)
        message = done.choices[0].message
        calls = tuple(
            Call.of(call.function.name, _arguments(call.function.arguments))
            for call in message.tool_calls or ()
        )
        reasoning = getattr(message, "reasoning_content", None) or ""
        return Reply(content=message.content or "", reasoning=reasoning, calls=calls)


def _arguments(text: str) -> dict[str, Any]:
    made = json.loads(text)
    assert isinstance(made, dict)
    return made
