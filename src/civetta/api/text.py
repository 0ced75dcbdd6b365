"""POST /tokenize, /detokenize and /apply-template: what the model is given, without running it.

Requests and replies fit llama.cpp's (`content`) and vLLM's (`prompt`) clients.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import msgspec

from civetta.api.chat_fields import ChatFields, conversation_of, template_options
from civetta.api.ignored import ignored_header
from civetta.api.service import check_model, engine_of
from civetta.api.wire import json_response, read_request
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from civetta.chat.tokenizer import Tokenizer
    from civetta.options import Settings


class TokenizeFields(msgspec.Struct, kw_only=True):
    """The body of /tokenize; `content` and `prompt` are two names of one text."""

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    # This model puts no token before or after a text, so that both values mean the same.
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class Piece(msgspec.Struct, kw_only=True):
    """A token and its text; one that is no UTF-8 of its own has its bytes."""

    id: int
    piece: str | list[int]


class TokenizeReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Ids, or ids with their texts; how many, and how many the context holds."""

    tokens: list[int | Piece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]
    model: str | None = None


class DetokenizeReply(msgspec.Struct, kw_only=True):
    """The text, under both names in use. Bytes that are no UTF-8 become U+FFFD."""

    content: str
    prompt: str


class TemplateReply(msgspec.Struct, kw_only=True):
    """The rendered conversation; `thinking`: the reply begins inside a thought."""

    prompt: str
    thinking: bool


async def tokenize(request: Request) -> Response:
    """Token ids of a text, none added; markers of the template count as tokens unless told not to."""
    engine = engine_of(request)
    fields, dropped = await read_request(request, TokenizeFields)
    check_model(request, fields.model)
    text = fields.content if fields.content is not None else fields.prompt
    if text is None or (fields.content is not None and fields.prompt not in (None, text)):
        raise RequestInvalid(
            "The text is given as content or as prompt: send one of them.", param="content"
        )
    tokenizer = engine.tokenizer
    ids = await asyncio.to_thread(
        tokenizer.encode, text, parse_special=fields.parse_special is not False
    )
    strings = [_text(tokenizer, token_id) for token_id in ids] if fields.return_token_strs else None
    reply = TokenizeReply(
        tokens=[_piece(tokenizer, i) for i in ids] if fields.with_pieces else list(ids),
        count=len(ids),
        max_model_len=engine.info.context_tokens,
        token_strs=strings,
    )
    return json_response(reply, headers=ignored_header(request, dropped))


async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens included. Raises RequestInvalid for an unknown id."""
    engine = engine_of(request)
    fields, dropped = await read_request(request, DetokenizeFields)
    check_model(request, fields.model)
    highest = max(fields.tokens, default=0)
    if highest >= engine.info.vocab_size:
        raise RequestInvalid(
            f"tokens has {highest}, and ids go from 0 to {engine.info.vocab_size - 1}.",
            param="tokens",
        )
    text = engine.tokenizer.decode(fields.tokens)
    return json_response(
        DetokenizeReply(content=text, prompt=text), headers=ignored_header(request, dropped)
    )


async def apply_template(request: Request) -> Response:
    """The prompt that a chat completion with this body would have; nothing is generated.

    Fields that have no part in the prompt are checked all the same.
    """
    engine = engine_of(request)
    settings: Settings = request.app.state.settings
    fields, dropped = await read_request(request, ChatFields)
    fields.check()
    check_model(request, fields.model)
    conversation, unused = conversation_of(
        fields, allow_image_urls=settings.server.allow_image_urls
    )
    options = template_options(fields, settings.reasoning)
    rendered = await asyncio.to_thread(engine.template.render, conversation, options)
    reply = TemplateReply(prompt=rendered.text, thinking=rendered.opens_thinking)
    return json_response(reply, headers=ignored_header(request, dropped + unused))


def _piece(tokenizer: Tokenizer, token_id: int) -> Piece:
    raw = tokenizer.token_bytes(token_id)
    try:
        return Piece(id=token_id, piece=raw.decode("utf-8"))
    except UnicodeDecodeError:
        return Piece(id=token_id, piece=list(raw))


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
