"""What a plain completion of either dialect asks the engine for, over the server's defaults."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from civetta.api.fields import sampling_of, stops_of
from civetta.api.service import client_of, timeout_of
from civetta.decode.presets import resolve, server_overrides
from civetta.engine.constraining import format_constraint
from civetta.engine.protocol import GenerateRequest

if TYPE_CHECKING:
    from starlette.requests import Request

    from civetta.api.completions import CompletionFields
    from civetta.api.llama_completion import LlamaFields
    from civetta.chat.answer_format import AnswerFormat
    from civetta.options import Settings
    from civetta.types import Constraint


async def constraint_for(form: AnswerFormat | None) -> Constraint | None:
    """What binds a plain completion from its first token on; worked out on a thread.

    Raises RequestInvalid with code `invalid_schema`.
    """
    return None if form is None else await asyncio.to_thread(format_constraint, form)


def plain_request(
    request: Request,
    fields: CompletionFields | LlamaFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    logit_bias: tuple[tuple[int, float], ...] = (),
    prompt_logprobs: int | None = None,
) -> GenerateRequest:
    """The request without its prompt; what the dialects spell alike is read from `fields`.

    Raises RequestInvalid naming the field at fault.
    """
    settings: Settings = request.app.state.settings
    return GenerateRequest(
        request_id=request.state.request_id,
        prompt_ids=(),
        sampling=resolve(
            sampling_of(fields),
            server_overrides(settings.sampling),
            thinking=settings.reasoning.think != "off",
            logprobs=logprobs,
            logit_bias=logit_bias,
        ),
        max_tokens=max_tokens,
        stop=stops_of(fields.stop),
        ignore_eos=bool(fields.ignore_eos),
        timeout_s=timeout_of(settings),
        use_cache=fields.cache_prompt is not False,
        client_id=client_of(request),
        prompt_logprobs=prompt_logprobs,
    )
