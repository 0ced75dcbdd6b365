"""The JSON of /v1/messages as types, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from civetta.api.reply_types import Timings  # noqa: TC001 - msgspec resolves it


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """Tokens of a message; `input_tokens` are those that no cache had."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]
    service_tier: Literal["standard"]


class AnthropicReply(msgspec.Struct, kw_only=True):
    """A message of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage
    timings: Timings


class AnthropicCount(msgspec.Struct, kw_only=True):
    """How many tokens a prompt has."""

    input_tokens: int


class AnthropicErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong; `code` and `param` are civetta's own."""

    type: str
    message: str
    code: str
    param: str | None


class AnthropicError(msgspec.Struct, kw_only=True):
    """Every error of /v1/messages, whatever its status."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
