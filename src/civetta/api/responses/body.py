"""The response object: what was asked, echoed, and what became of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from civetta.api.accounting import timings_payload
from civetta.types import FinishReason

if TYPE_CHECKING:
    from civetta.api.responses.fields import ResponsesFields, TextFormat
    from civetta.engine.client import ReplyEnd
    from civetta.errors import CivettaError
    from civetta.types import SamplingParams, Usage


def new_response(
    fields: ResponsesFields, sampling: SamplingParams, *, response_id: str, model: str, store: bool
) -> dict[str, Any]:
    """The response before anything was generated; `sampling` is what is in force."""
    reasoning, text = fields.reasoning, fields.text
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": fields.summary,
        },
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": store,
        "temperature": sampling.temperature,
        "text": {
            "format": _format(None if text is None else text.format),
            "verbosity": "medium" if text is None else text.verbosity or "medium",
        },
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": fields.tools or [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
        "user": fields.user,
    }


def _format(form: TextFormat | None) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    return {key: value for key, value in msgspec.structs.asdict(form).items() if value is not None}


def ended(response: dict[str, Any], output: list[dict[str, Any]], end: ReplyEnd) -> dict[str, Any]:
    """The response with all its output: completed, or incomplete for want of tokens."""
    cut = end.finish_reason is FinishReason.LENGTH
    return {
        **response,
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": usage_payload(end.usage),
        "timings": timings_payload(end.usage),
    }


def failed(
    response: dict[str, Any], output: list[dict[str, Any]], error: CivettaError
) -> dict[str, Any]:
    """The response of a reply that broke off; the code is one that clients of OpenAI know."""
    return {
        **response,
        "status": "failed",
        "error": {"code": "server_error", "message": error.message},
        "output": output,
    }


def usage_payload(usage: Usage) -> dict[str, Any]:
    """The `usage` object of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
