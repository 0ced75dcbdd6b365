"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from civetta.errors import ContextOverflow, RequestError

if TYPE_CHECKING:
    from civetta.errors import CivettaError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_payload(error: CivettaError, request_id: str) -> dict[str, Any]:
    """The body of an error, which is also the `error` event of a stream.

    `code` and `param` are civetta's additions. A prompt that does not fit says so in the words that
    make Claude Code compact its conversation.
    """
    status = error.http_status
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextOverflow):
        message = (
            f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens} maximum."
            f" {message}"
        )
    detail: dict[str, Any] = {"type": kind, "message": message, "code": error.code}
    detail["param"] = error.param if isinstance(error, RequestError) else None
    return {"type": "error", "error": detail, "request_id": request_id}
