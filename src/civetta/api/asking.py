"""What every dialect's conversation becomes: the options of a reply, over the server's defaults.

A dialect reads its own body into a `Conversation` and the arguments below; from here on its
request is like any other's: `client_for(request).generate(conversation, options_for(...))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from civetta.api.service import client_of, engine_of, timeout_of
from civetta.chat.template import TemplateOptions
from civetta.decode.presets import server_overrides
from civetta.engine.client import ChatClient, ReplyOptions, thinking_budget

if TYPE_CHECKING:
    from starlette.requests import Request

    from civetta.options import ReasoningOptions, Settings


def client_for(request: Request) -> ChatClient:
    """The chat client of this server. Raises EngineClosed while the model loads."""
    settings: Settings = request.app.state.settings
    return ChatClient(engine_of(request), server=server_overrides(settings.sampling))


def options_for(request: Request, **asked: Any) -> ReplyOptions:
    """The fields `asked` of `ReplyOptions`, with the limits and names of this HTTP request.

    A `thinking_budget` that is left out, or None, is the server's.
    """
    settings: Settings = request.app.state.settings
    if asked.get("thinking_budget") is None:
        asked["thinking_budget"] = thinking_budget(settings.reasoning)
    return ReplyOptions(
        timeout_s=timeout_of(settings),
        request_id=request.state.request_id,
        client_id=client_of(request),
        **asked,
    )


def template_for(
    server: ReasoningOptions,
    *,
    think: bool | None = None,
    effort: str | None = None,
    keep: bool | None = None,
    add_vision_id: bool = False,
) -> TemplateOptions:
    """How to render: what a request says, else the server's flags, else the template.

    An effort implies thinking; effort none or thinking off drop the server's effort. Raises
    RequestInvalid with code `invalid_reasoning` for values that contradict each other.
    """
    if think is None and effort in (None, "auto"):
        think = switch(server.think)
    if effort is None:
        effort = "auto" if think is False else server.reasoning_effort
    return TemplateOptions(
        enable_thinking=think,
        reasoning_effort=effort,
        preserve_thinking=switch(server.preserve_thinking) if keep is None else keep,
        add_vision_id=add_vision_id,
    )


def switch(mode: str) -> bool | None:
    """A three-way flag as a value: on, off, or None for auto."""
    return {"on": True, "off": False}.get(mode)
