"""/v1/responses: generate a response, read, list and delete kept ones, count input tokens."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from civetta.api.asking import client_for, options_for, template_for
from civetta.api.chat_fields import TemplateFields
from civetta.api.delivery import Delivery
from civetta.api.fields import budget_of, neutral, refuse, sampling_of
from civetta.api.ignored import ignored_header
from civetta.api.responses.body import new_response
from civetta.api.responses.conversation import input_items, read_conversation
from civetta.api.responses.encoder import ResponsesEncoder
from civetta.api.responses.fields import ResponsesFields
from civetta.api.responses.output import OutputItems
from civetta.api.responses.store import Stored
from civetta.api.responses.truncation import generate_truncated
from civetta.api.service import check_model, engine_of, model_id
from civetta.api.wire import json_response, read_request
from civetta.errors import RequestInvalid, ResponseNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from civetta.api.responses.conversation import Asked
    from civetta.api.responses.store import ResponseStore
    from civetta.chat.template import TemplateOptions
    from civetta.engine.client import ReplyEvent, ReplyOptions
    from civetta.options import ReasoningOptions, Settings

NO_STORE = "responses are not kept by this server; start it with --store DIR"
LIST_MAX = 100


async def create(request: Request) -> Delivery[ReplyEvent]:
    """POST /v1/responses: generate; buffered or as typed server-sent events."""
    engine = engine_of(request)
    fields, dropped = await read_request(request, ResponsesFields)
    fields.check()
    store = _store_for(request, fields)
    asked = await _read(request, fields)
    options = _reply_options(request, fields, asked)
    client = client_for(request)
    generate = client.generate
    if fields.truncation == "auto":
        generate = partial(generate_truncated, client)
    generation = await generate(asked.conversation, options)
    response = new_response(
        fields,
        generation.request.sampling,
        response_id=f"resp_{secrets.token_hex(24)}",
        model=model_id(request),
        store=store is not None,
    )
    encoder = ResponsesEncoder(
        response,
        OutputItems(
            summary=fields.summary is not None,
            namespaces=asked.namespaces,
            tokens=None if options.logprobs is None else engine.tokenizer,
            seal=request.app.state.seal if fields.wants_sealed else None,
        ),
        timeout_s=options.timeout_s,
        keep=None if store is None else _keeper(store, fields),
    )
    return Delivery(
        generation,
        encoder,
        stream=bool(fields.stream),
        pace=request.app.state.pace,
        headers=ignored_header(request, dropped + asked.unused, generation.request.constraint),
        framing=encoder,
    )


async def count(request: Request) -> Response:
    """POST /v1/responses/input_tokens: how many tokens the prompt of such a request has."""
    fields, dropped = await read_request(request, ResponsesFields)
    fields.check()
    neutral("stream", fields.stream, False, "tokens are counted at once")
    asked = await _read(request, fields)
    options = _reply_options(request, fields, asked)
    prepared = await client_for(request).prepared(asked.conversation, options)
    tokens = len(prepared.request.prompt_ids)
    constraint = prepared.request.constraint
    headers = ignored_header(request, dropped + asked.unused, constraint)
    return json_response(
        {"object": "response.input_tokens", "input_tokens": tokens}, headers=headers
    )


async def read(request: Request) -> Response:
    """GET /v1/responses/{id}: the response as it ended."""
    if request.query_params.get("stream") not in (None, "false"):
        refuse("stream", "a kept response is not replayed as events")
    return json_response((await _kept(request)).response)


async def delete(request: Request) -> Response:
    """DELETE /v1/responses/{id}: forget it; what goes on from it cannot be continued then."""
    stored = await _kept(request)
    response_id = stored.response["id"]
    await _store(request).delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: what its request brought, a page at a time.

    Takes `limit` (1 to 100, 20 unless given), `order` (desc unless given) and `after`, an id.
    """
    items = (await _kept(request)).input_items
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        refuse("order", "give asc or desc")
    items = items if order == "asc" else items[::-1]
    after = request.query_params.get("after")
    if after is not None:
        places = [n for n, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestInvalid(f"after is {after[:80]!r}: no such item.", param="after")
        items = items[places[0] + 1 :]
    limit = _limit(request.query_params.get("limit", "20"))
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": None,
            "last_id": None,
            **ends,
            "has_more": len(items) > limit,
        }
    )


async def _read(request: Request, fields: ResponsesFields) -> Asked:
    """The conversation, with what `previous_response_id` stands for before it."""
    check_model(request, fields.model)
    settings: Settings = request.app.state.settings
    return read_conversation(
        fields,
        await _earlier(request, fields.previous_response_id),
        allow_image_urls=settings.server.allow_image_urls,
        drop_unknown=settings.server.drop_unknown,
        seal=request.app.state.seal,
    )


async def _earlier(request: Request, response_id: str | None) -> list[dict[str, Any]]:
    if response_id is None:
        return []
    store: ResponseStore | None = request.app.state.responses
    if store is None:
        refuse("previous_response_id", f"{NO_STORE}, or send the whole conversation as input")
    chain = await store.chain(response_id)
    if chain is None:
        raise RequestInvalid(
            f"The response {response_id[:80]!r}, or one before it, is not kept here: send the whole"
            " conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [item for stored in chain for item in stored.items]


def _store_for(request: Request, fields: ResponsesFields) -> ResponseStore | None:
    """Where this response goes; responses are kept unless the request says otherwise."""
    store: ResponseStore | None = request.app.state.responses
    if store is None and fields.store:
        refuse("store", NO_STORE)
    return None if fields.store is False else store


def _keeper(store: ResponseStore, fields: ResponsesFields) -> Callable[[dict[str, Any]], None]:
    items = [
        {**item, "id": item.get("id") or f"item_{secrets.token_hex(24)}"}
        for item in input_items(fields.input)
    ]
    return lambda response: store.put(Stored(response=response, input_items=items))


def _reply_options(request: Request, fields: ResponsesFields, asked: Asked) -> ReplyOptions:
    settings: Settings = request.app.state.settings
    return options_for(
        request,
        template=_template(fields, settings.reasoning),
        sampling=sampling_of(fields),
        logprobs=fields.logprob_count,
        max_tokens=budget_of(
            settings.sampling.max_tokens, max_output_tokens=fields.max_output_tokens
        ),
        answer_format=fields.answer_format,
        tool_choice=asked.choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        use_cache=fields.cache_prompt is not False,
    )


def _template(fields: ResponsesFields, server: ReasoningOptions) -> TemplateOptions:
    kwargs = fields.chat_template_kwargs or TemplateFields()
    effort = None if fields.reasoning is None else fields.reasoning.effort
    if None not in (effort, kwargs.reasoning_effort) and effort != kwargs.reasoning_effort:
        raise RequestInvalid(
            "reasoning.effort and chat_template_kwargs say different things about"
            " reasoning_effort: send one of them.",
            param="reasoning.effort",
            code="invalid_reasoning",
        )
    keep = fields.keep_reasoning
    return template_for(
        server,
        think=kwargs.enable_thinking,
        effort=kwargs.reasoning_effort if effort is None else effort,
        keep=kwargs.preserve_thinking if keep is None else keep,
        add_vision_id=bool(kwargs.add_vision_id),
    )


def _store(request: Request) -> ResponseStore:
    store: ResponseStore | None = request.app.state.responses
    if store is None:
        raise ResponseNotFound(f"There are no responses here: {NO_STORE}.", param="response_id")
    return store


async def _kept(request: Request) -> Stored:
    response_id: str = request.path_params["response_id"]
    stored = await _store(request).get(response_id)
    if stored is None:
        raise ResponseNotFound(
            f"The response {response_id[:80]!r} is not kept here.", param="response_id"
        )
    return stored


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= LIST_MAX):
        raise RequestInvalid(
            f"limit is {text[:40]!r}: give a whole number from 1 to {LIST_MAX}.", param="limit"
        )
    return int(text)
