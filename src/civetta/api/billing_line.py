"""Claude Code's billing line, which would keep every prompt out of the prefix cache.

It stands at the front of the system prompt, whichever API the prompt comes by, and its last value
differs in every request: `x-anthropic-billing-header: cc_version=...; cch=36ee5;`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from civetta.chat.message import Message, Part, TextPart

_LINE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*(?:\n\s*|\Z)", re.IGNORECASE)


def without_billing_line(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, where a part of a system message begins with the line: without it."""
    return tuple(
        replace(message, parts=tuple(_cleaned(message.parts)))
        if message.role in ("system", "developer")
        else message
        for message in messages
    )


def _cleaned(parts: tuple[Part, ...]) -> list[Part]:
    return [
        replace(part, text=_LINE.sub("", part.text)) if isinstance(part, TextPart) else part
        for part in parts
    ]
