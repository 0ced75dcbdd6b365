"""The JSON of /v1/responses as types, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from civetta.api.reply_types import CompletionDetails, Timings  # noqa: TC001 - msgspec resolves it


class ResponseTokenDetails(msgspec.Struct, kw_only=True):
    """Tokens of the input that needed no work; none is ever paid for being kept."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: ResponseTokenDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """A response of /v1/responses; what the request said is in it again."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage
    user: str | None
    timings: Timings


class InputTokens(msgspec.Struct, kw_only=True):
    """How many tokens a prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(msgspec.Struct, kw_only=True):
    """A response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(msgspec.Struct, kw_only=True):
    """A page of a response's input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
