"""/v1/messages: generate a message, or count the tokens of its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.api.asking import client_for, options_for
from civetta.api.delivery import Delivery
from civetta.api.fields import budget_of, neutral, refuse, sampling_of, stops_of
from civetta.api.ignored import ignored_header
from civetta.api.image_fields import ImageParts
from civetta.api.messages.blocks import BlockReader
from civetta.api.messages.encoder import MessageEncoder
from civetta.api.messages.fields import MAX_STOP_SEQUENCES, MessagesFields
from civetta.api.messages.tools import read_tools
from civetta.api.service import check_model, model_id
from civetta.api.wire import json_response, read_request
from civetta.chat.message import Conversation
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from civetta.engine.client import ReplyEvent, ReplyOptions
    from civetta.options import Settings


async def create(request: Request) -> Delivery[ReplyEvent]:
    """POST /v1/messages: generate; buffered or as Anthropic's server-sent events."""
    fields, dropped = await read_request(request, MessagesFields, spelled="messages")
    conversation, options, unused = _asked(request, fields)
    encoder = MessageEncoder(
        model=model_id(request),
        request_id=options.request_id,
        shown=fields.shows_thinking,
        timeout_s=options.timeout_s,
    )
    generation = await client_for(request).generate(conversation, options)
    constraint = generation.request.constraint
    return Delivery(
        generation,
        encoder,
        stream=bool(fields.stream),
        pace=request.app.state.pace,
        headers=ignored_header(request, dropped + unused, constraint),
        framing=encoder,
    )


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens: how many tokens the prompt of such a request has."""
    fields, dropped = await read_request(request, MessagesFields, spelled="messages")
    neutral("stream", fields.stream, False, "tokens are counted at once")
    conversation, options, unused = _asked(request, fields)
    prepared = await client_for(request).prepared(conversation, options)
    asked = prepared.request
    return json_response(
        {"input_tokens": len(asked.prompt_ids)},
        headers=ignored_header(request, dropped + unused, asked.constraint),
    )


def _asked(
    request: Request, fields: MessagesFields
) -> tuple[Conversation, ReplyOptions, list[str]]:
    """What the request means, and the paths of what has no effect. Raises RequestInvalid."""
    settings: Settings = request.app.state.settings
    fields.check()
    check_model(request, fields.model)
    drop_unknown = settings.server.drop_unknown
    reader = BlockReader(
        ImageParts(allow_urls=settings.server.allow_image_urls), drop_unknown=drop_unknown
    )
    if fields.system is not None:
        reader.system(fields.system)
    for index, message in enumerate(fields.messages):
        reader.turn(message, f"messages[{index}]")
    _check_last(fields)
    specs, choice, unused = read_tools(fields, drop_unknown=drop_unknown)
    one_call = fields.tool_choice is not None and fields.tool_choice.disable_parallel_tool_use
    options = options_for(
        request,
        template=fields.template(settings.reasoning),
        sampling=sampling_of(fields),
        max_tokens=budget_of(settings.sampling.max_tokens, max_tokens=fields.max_tokens),
        stop=stops_of(fields.stop_sequences, name="stop_sequences", most=MAX_STOP_SEQUENCES),
        tool_choice=choice,
        parallel_tool_calls=not one_call,
        answer_format=fields.answer_format,
        thinking_budget=fields.thinking_budget,
        use_cache=fields.cache_prompt is not False,
    )
    conversation = Conversation(messages=reader.finish(), tools=specs)
    unwanted = ["context_management"] if fields.context_management else []
    return conversation, options, reader.unused + unused + unwanted


def _check_last(fields: MessagesFields) -> None:
    if not fields.messages:
        raise RequestInvalid("messages is empty: send a user's turn.", param="messages")
    roles = [message.role for message in fields.messages if message.role != "system"]
    if roles and roles[-1] == "assistant":
        refuse(
            f"messages[{len(fields.messages) - 1}].role",
            "a reply is not begun by its client, so the last turn has to be a user's",
        )
