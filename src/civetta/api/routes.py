"""Every operation of the server in one table: the application routes by it, /openapi.json tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from civetta.api import chat, completions, llama_completion, metrics, openapi, service, slots, text
from civetta.api import reply_types as replies
from civetta.api.chat_fields import ChatFields
from civetta.api.messages import endpoint as messages
from civetta.api.messages import reply_types as message_replies
from civetta.api.messages.fields import MessagesFields
from civetta.api.responses import endpoint as responses
from civetta.api.responses import reply_types as response_replies
from civetta.api.responses.fields import ResponsesFields

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One operation.

    `body` is the struct that reads the request; `reply` the type of its JSON, or a media type.
    With `streams` the body's `stream: true` gives server-sent events instead. `statuses` are those
    of errors, besides the ones that every operation has; `query` names query parameters; `error` is
    the JSON of an error.
    """

    method: str
    paths: tuple[str, ...]
    handler: Callable[..., Any]
    reply: Any
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    statuses: tuple[int, ...] = ()
    query: tuple[str, ...] = ()
    error: type[msgspec.Struct] = replies.Error


_RUNS = (404, 408, 413, 429, 499, 500, 503, 504)
_READS = (404, 408, 413, 503)

ENDPOINTS = (
    Endpoint(
        method="GET",
        paths=("/health", "/healthz", "/v1/health"),
        handler=service.health,
        reply=replies.Health,
        statuses=(503,),
    ),
    Endpoint(
        method="GET",
        paths=("/ready", "/readyz", "/v1/ready"),
        handler=service.ready,
        reply=replies.Ready,
        statuses=(503,),
    ),
    Endpoint(method="GET", paths=("/metrics",), handler=metrics.metrics, reply="text/plain"),
    Endpoint(
        method="GET",
        paths=("/v1/models", "/models"),
        handler=service.models,
        reply=replies.ModelList,
        statuses=(503,),
    ),
    Endpoint(
        method="GET",
        paths=("/v1/models/{model_id:path}",),
        handler=service.model,
        reply=replies.Model,
        statuses=(404, 503),
    ),
    Endpoint(
        method="GET",
        paths=("/slots", "/v1/slots"),
        handler=slots.slots,
        reply=list[replies.Slot],
        statuses=(503,),
        query=("fail_on_no_slot",),
    ),
    Endpoint(
        method="GET", paths=("/props",), handler=slots.props, reply=replies.Props, statuses=(503,)
    ),
    Endpoint(
        method="DELETE",
        paths=("/v1/requests/{request_id}",),
        handler=service.abort,
        reply=replies.Aborted,
        statuses=(404, 503),
    ),
    Endpoint(
        method="POST",
        paths=("/v1/chat/completions", "/chat/completions"),
        handler=chat.chat_completions,
        body=ChatFields,
        reply=replies.ChatCompletion,
        streams=True,
        statuses=_RUNS,
    ),
    Endpoint(
        method="POST",
        paths=("/v1/completions",),
        handler=completions.completions,
        body=completions.CompletionFields,
        reply=replies.Completion,
        streams=True,
        statuses=_RUNS,
    ),
    Endpoint(
        method="POST",
        paths=("/completion",),
        handler=llama_completion.llama_completion,
        body=llama_completion.LlamaFields,
        reply=replies.LlamaCompletion,
        streams=True,
        statuses=_RUNS,
    ),
    Endpoint(
        method="POST",
        paths=("/tokenize",),
        handler=text.tokenize,
        body=text.TokenizeFields,
        reply=text.TokenizeReply,
        statuses=_READS,
    ),
    Endpoint(
        method="POST",
        paths=("/detokenize",),
        handler=text.detokenize,
        body=text.DetokenizeFields,
        reply=text.DetokenizeReply,
        statuses=_READS,
    ),
    Endpoint(
        method="POST",
        paths=("/apply-template",),
        handler=text.apply_template,
        body=ChatFields,
        reply=text.TemplateReply,
        statuses=_READS,
    ),
    Endpoint(
        method="POST",
        paths=("/v1/responses",),
        handler=responses.create,
        body=ResponsesFields,
        reply=response_replies.Response,
        streams=True,
        statuses=_RUNS,
    ),
    Endpoint(
        method="POST",
        paths=("/v1/responses/input_tokens",),
        handler=responses.count,
        body=ResponsesFields,
        reply=response_replies.InputTokens,
        statuses=_READS,
    ),
    Endpoint(
        method="GET",
        paths=("/v1/responses/{response_id}",),
        handler=responses.read,
        reply=response_replies.Response,
        statuses=(400, 404),
        query=("stream",),
    ),
    Endpoint(
        method="DELETE",
        paths=("/v1/responses/{response_id}",),
        handler=responses.delete,
        reply=response_replies.ResponseDeleted,
        statuses=(404,),
    ),
    Endpoint(
        method="GET",
        paths=("/v1/responses/{response_id}/input_items",),
        handler=responses.list_input,
        reply=response_replies.InputItems,
        statuses=(400, 404),
        query=("limit", "order", "after"),
    ),
    Endpoint(
        method="POST",
        paths=("/v1/messages",),
        handler=messages.create,
        body=MessagesFields,
        reply=message_replies.AnthropicReply,
        streams=True,
        statuses=_RUNS,
        error=message_replies.AnthropicError,
    ),
    Endpoint(
        method="POST",
        paths=("/v1/messages/count_tokens",),
        handler=messages.count_tokens,
        body=MessagesFields,
        reply=message_replies.AnthropicCount,
        statuses=_READS,
        error=message_replies.AnthropicError,
    ),
    Endpoint(
        method="GET", paths=("/openapi.json",), handler=openapi.document, reply=dict[str, Any]
    ),
)


def routes() -> list[Route]:
    """The table as Starlette's routes."""
    return [
        Route(path, endpoint.handler, methods=[endpoint.method])
        for endpoint in ENDPOINTS
        for path in endpoint.paths
    ]
