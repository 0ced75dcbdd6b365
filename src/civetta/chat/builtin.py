"""The chat format of the model in Python, for files without a template (model.md A.10).

It renders what `BUILTIN_TEMPLATE` renders, without a template engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from civetta.chat.builtin_text import (
    BAD_EFFORT,
    BAD_PART,
    BAD_ROLE,
    EFFORT_SENTENCES,
    IMAGE_TEXT,
    NO_MESSAGES,
    NO_QUERY,
    SYSTEM_LATE,
    SYSTEM_MEDIA,
    TOOLS_HEAD,
    TOOLS_TAIL,
    VIDEO_TEXT,
)
from civetta.chat.json_text import json_text
from civetta.chat.tools import render_call
from civetta.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class BuiltinTemplate:
    """The Python renderer, with the face of `BoundedTemplate`; it has no state."""

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text that BUILTIN_TEMPLATE makes of the same variables; raises TemplateError."""
        return _Rendering(variables).run()


class _Rendering:
    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._messages: Sequence[Mapping[str, Any]] = variables.get("messages") or ()
        self._tools: Sequence[Any] = variables.get("tools") or ()
        self._thinking = variables.get("enable_thinking", True) is True
        self._effort = variables.get("reasoning_effort", "xhigh")
        self._preserve = variables.get("preserve_thinking", True) is True
        self._vision_ids = bool(variables.get("add_vision_id"))
        self._generate = bool(variables.get("add_generation_prompt"))
        self._images = 0
        self._videos = 0
        self._out: list[str] = []

    def run(self) -> str:
        if not self._messages:
            raise _refusal(NO_MESSAGES)
        self._system_turn()
        query = self._last_query()
        for index, message in enumerate(self._messages):
            text = self._flat(message.get("content"), counted=True).strip()
            role = message.get("role")
            if role == "system":
                if index:
                    raise _refusal(SYSTEM_LATE)
            elif role == "user":
                self._out.append(f"<|im_start|>user\n{text}<|im_end|>\n")
            elif role == "assistant":
                self._assistant(message, text, self._preserve or index > query)
            elif role == "tool":
                self._tool(index, text)
            else:
                raise _refusal(BAD_ROLE)
        if self._generate:
            thought = "<think>\n" if self._thinking else "<think>\n\n</think>\n\n"
            self._out.append(f"<|im_start|>assistant\n{thought}")
        return "".join(self._out)

    def _system_turn(self) -> None:
        if self._thinking and self._effort not in EFFORT_SENTENCES:
            raise _refusal(BAD_EFFORT)
        blocks = [EFFORT_SENTENCES[self._effort]] if self._thinking else []
        if self._tools:
            lines = "".join(f"\n{json_text(tool)}" for tool in self._tools)
            blocks.append(TOOLS_HEAD + lines + TOOLS_TAIL)
        first = self._messages[0]
        if first.get("role") == "system":
            content = first.get("content") or ()
            if not isinstance(content, str) and any(p.get("type") != "text" for p in content):
                raise _refusal(SYSTEM_MEDIA)
            blocks.append(self._flat(content, counted=False).strip())
        if any(blocks):
            body = "\n\n".join(block for block in blocks if block)
            self._out.append(f"<|im_start|>system\n{body}<|im_end|>\n")

    def _last_query(self) -> int:
        for index in range(len(self._messages) - 1, -1, -1):
            if self._messages[index].get("role") == "user":
                text = self._flat(self._messages[index].get("content"), counted=False).strip()
                if not (text.startswith("<tool_response>") and text.endswith("</tool_response>")):
                    return index
        raise _refusal(NO_QUERY)

    def _assistant(self, message: Mapping[str, Any], text: str, with_thought: bool) -> None:
        self._out.append("<|im_start|>assistant\n")
        if with_thought:
            reasoning = message.get("reasoning_content")
            thought = reasoning.strip() if isinstance(reasoning, str) else ""
            self._out.append(f"<think>\n{thought}\n</think>\n\n")
        self._out.append(text)
        gap = "\n\n" if text else ""
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            self._out.append(gap + render_call(function["name"], function.get("arguments") or {}))
            gap = "\n"
        self._out.append("<|im_end|>\n")

    def _tool(self, index: int, text: str) -> None:
        neighbours = self._messages[index - 1 : index] if index else ()
        if not neighbours or neighbours[0].get("role") != "tool":
            self._out.append("<|im_start|>user")
        self._out.append(f"\n<tool_response>\n{text}\n</tool_response>")
        after = self._messages[index + 1 : index + 2]
        if not after or after[0].get("role") != "tool":
            self._out.append("<|im_end|>\n")

    def _flat(self, content: Any, *, counted: bool) -> str:
        if isinstance(content, str):
            return content
        return "".join(self._part(part, counted) for part in content or ())

    def _part(self, part: Mapping[str, Any], counted: bool) -> str:
        kind = part.get("type")
        if kind == "text":
            return str(part["text"])
        if kind not in ("image", "video"):
            raise _refusal(BAD_PART)
        label = ""
        if counted and kind == "image":
            self._images += 1
            label = f"Picture {self._images}: "
        elif counted:
            self._videos += 1
            label = f"Video {self._videos}: "
        return (label if self._vision_ids else "") + (IMAGE_TEXT if kind == "image" else VIDEO_TEXT)


def _refusal(sentence: str) -> TemplateError:
    return TemplateError(sentence, param="messages")
