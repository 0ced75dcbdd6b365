"""An error as a response, in the dialect of the path that was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.api.account import account_of
from civetta.api.messages.errors import error_payload
from civetta.api.wire import error_response
from civetta.errors import ContextOverflow

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import Scope

    from civetta.errors import CivettaError

ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/")
_PROMPT_FIELDS = {
    "/v1/completions": "prompt",
    "/completion": "prompt",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
}
"""The field that is too long where a prompt does not fit, if it is not messages."""


def refusal(scope: Scope, error: CivettaError) -> Response:
    """The response; the request's account learns of the error."""
    account = account_of(scope)
    account.failed(error)
    path: str = scope["path"]
    if isinstance(error, ContextOverflow):
        error.param = _PROMPT_FIELDS.get(path, error.param)
    if path == ANTHROPIC_PATHS[0] or path.startswith(ANTHROPIC_PATHS[1]):
        return error_response(error, error_payload(error, account.request_id))
    return error_response(error)
