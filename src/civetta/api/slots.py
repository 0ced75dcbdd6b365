"""GET /slots and /props, in llama.cpp's shapes: what runs now, and how the server is set up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import civetta
from civetta.api.service import engine_of, model_id
from civetta.api.wire import json_response
from civetta.decode.presets import resolve, server_overrides
from civetta.errors import NoSlotFree

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from civetta.engine.protocol import EngineClient, RequestView
    from civetta.options import Settings


async def slots(request: Request) -> Response:
    """GET /slots: one entry a session, those that run first; no text of anybody's.

    With `?fail_on_no_slot=1` 503 when every session is taken.
    """
    engine, settings = engine_of(request), request.app.state.settings
    running = [view for view in engine.views() if view.state != "queued"]
    total = settings.engine.sessions
    wanted = request.query_params.get("fail_on_no_slot", "") in ("1", "true")
    if wanted and len(running) >= total:
        raise NoSlotFree(f"All {total} sessions are taken: try again later.")
    views: list[RequestView | None] = [*running, *[None] * (total - len(running))]
    entries = [
        _slot(index, view, engine, speculative=settings.drafting.speculative != "off")
        for index, view in enumerate(views)
    ]
    return json_response(entries)


async def props(request: Request) -> Response:
    """GET /props: the defaults of a request, the template, what the model can do."""
    engine, settings = engine_of(request), request.app.state.settings
    info = engine.info
    specials = engine.tokenizer.named_tokens if info.has_tokenizer else {}
    payload = {
        "default_generation_settings": {
            "n_ctx": info.context_tokens,
            "params": _defaults(settings),
        },
        "total_slots": settings.engine.sessions,
        "model_alias": model_id(request),
        "model_path": Path(info.path).name,  # where it lies on this machine is nobody's business
        "chat_template": (engine.template.source or "") if info.has_tokenizer else "",
        "bos_token": specials.get("bos_token", ""),
        "eos_token": specials.get("eos_token", ""),
        "modalities": {"vision": info.images is not None, "audio": False},
        "n_ctx": info.context_tokens,
        "build_info": f"civetta {civetta.__version__}",
    }
    return json_response(payload)


def _slot(
    index: int, view: RequestView | None, engine: EngineClient, *, speculative: bool
) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": index,
        "n_ctx": engine.info.context_tokens,
        "speculative": speculative,
        "is_processing": view is not None,
        "prompt": "",
        "state": "idle" if view is None else view.state,
    }
    if view is None:
        return slot
    left = -1 if view.max_tokens is None else view.max_tokens - view.generated_tokens
    return {
        **slot,
        "id_task": int(view.request_id[1:]) if view.request_id[1:].isdigit() else -1,
        "request_id": view.request_id,
        "n_prompt_tokens": view.prompt_tokens,
        "n_prompt_tokens_cache": view.cached_tokens,
        "n_prompt_tokens_processed": view.processed_tokens,
        "next_token": [{"n_decoded": view.generated_tokens, "n_remain": left}],
    }


def _defaults(settings: Settings) -> dict[str, Any]:
    """Sampling of a request that says nothing about it; seed -1 is one drawn a request."""
    sampling = resolve(
        server_overrides(settings.sampling),
        thinking=settings.reasoning.think != "off",
        draw_seed=lambda: -1,
    )
    values = asdict(sampling)
    del values["logprobs"]
    return {**values, "n_predict": settings.sampling.max_tokens}
