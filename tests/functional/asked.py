"""A served model behind the openai SDK."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image
from training.data.graders import Call, Reply

if TYPE_CHECKING:
    import numpy as np
    import openai
    from training.data.heldout import EvalItem
    from training.data.sample import Message


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
        messages = with_pictures(item.messages, item.images)
        done = self.send(messages, thinking=item.enable_thinking, max_tokens=room, **more)
        message = done.choices[0].message
        calls = tuple(
            Call.of(call.function.name, _arguments(call.function.arguments))
            for call in message.tool_calls or ()
        )
        reasoning = getattr(message, "reasoning_content", None) or ""
        return Reply(content=message.content or "", reasoning=reasoning, calls=calls)


def with_pictures(messages: list[Message], images: tuple[np.ndarray, ...]) -> list[Message]:
    """The messages in the API's form: every image part becomes the next picture's data URL."""
    left = iter(images)

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] != "image":
            return given
        return {"type": "image_url", "image_url": {"url": png_url(next(left))}}

    return [
        m if isinstance(m["content"], str) else m | {"content": [part(p) for p in m["content"]]}
        for m in messages
    ]


def png_url(pixels: np.ndarray) -> str:
    """A data URL of uint8 pixels [height, width, 3]."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def _arguments(text: str) -> dict[str, Any]:
    made = json.loads(text)
    assert isinstance(made, dict)
    return made
