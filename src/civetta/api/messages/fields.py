"""The body of POST /v1/messages; its content blocks are read one by one in `blocks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from civetta.api.asking import switch, template_for
from civetta.api.fields import SamplingFields, neutral, refuse
from civetta.chat.answer_format import AnswerFormat
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from civetta.chat.template import TemplateOptions
    from civetta.options import ReasoningOptions

MAX_STOP_SEQUENCES = 64
EFFORTS = ("low", "medium", "high", "xhigh", "max")
DISPLAYS = (None, "summarized", "omitted")


class AnthropicThinking(msgspec.Struct, kw_only=True):
    """`thinking`: whether to think, for how long, and whether to show it."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """`output_config.format`: a JSON schema."""

    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config`: how hard to think, and the form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class AnthropicChoice(msgspec.Struct, kw_only=True):
    """`tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One turn; a system turn may stand anywhere."""

    role: str
    content: str | list[dict[str, Any]]


class MessagesFields(SamplingFields, kw_only=True):
    """The body of a request; POST /v1/messages/count_tokens takes the same."""

    messages: list[AnthropicMessage]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: AnthropicChoice | None = None
    cache_prompt: bool | None = None
    # Labels and wishes of a hosted service; they never change a reply.
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # What a hosted service would leave out of a long conversation; here nothing is.
    context_management: dict[str, Any] | None = None
    # Taken at their neutral values.
    service_tier: str | None = None
    speed: str | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None

    def check(self) -> None:
        """Refuse what is not supported; raises RequestInvalid naming the field."""
        if self.service_tier not in (None, "auto", "standard_only"):
            refuse("service_tier", "there is one tier, so only auto and standard_only are accepted")
        neutral("speed", self.speed, "standard", "there is one speed")
        neutral("mcp_servers", self.mcp_servers, [], "the client calls tools, the server does not")
        if self.container is not None:
            refuse("container", "there are no containers here; leave it out")
        thinking = self.thinking
        if thinking is not None:
            if thinking.type not in ("enabled", "disabled", "adaptive", "between_tools"):
                refuse("thinking.type", "give enabled, adaptive or disabled")
            if thinking.display not in DISPLAYS:
                refuse("thinking.display", "give summarized or omitted")
            if thinking.budget_tokens is not None and thinking.budget_tokens < 1:
                raise RequestInvalid(
                    f"thinking.budget_tokens is {thinking.budget_tokens}: give at least 1.",
                    param="thinking.budget_tokens",
                )
        effort = self._output.effort
        if effort not in (None, *EFFORTS):
            refuse("output_config.effort", f"give one of {', '.join(EFFORTS)}")

    @property
    def _output(self) -> OutputConfig:
        return self.output_config or OutputConfig()

    @property
    def shows_thinking(self) -> bool:
        """Whether thoughts are sent as text; else only their signature is."""
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def thinking_budget(self) -> int | None:
        """Tokens of thought at most, whatever kind of thinking is asked for."""
        return None if self.thinking is None else self.thinking.budget_tokens

    def template(self, server: ReasoningOptions) -> TemplateOptions:
        """How to render: a request that says nothing of thinking gets none, as in Anthropic's API.

        The server's --think on overrides that. An effort matters while thinking is on, and never
        turns it on.
        """
        kind = None if self.thinking is None else self.thinking.type
        think = bool(switch(server.think)) if kind is None else kind != "disabled"
        return template_for(server, think=think, effort=self._output.effort if think else None)

    @property
    def answer_format(self) -> AnswerFormat | None:
        """The form that the answer has to have; None for text. Raises RequestInvalid."""
        form = self._output.format
        if form is None:
            return None
        if form.type != "json_schema":
            refuse("output_config.format.type", "only json_schema is known")
        return AnswerFormat(
            kind="json_schema",
            schema=form.schema,
            strict=True,
            param="output_config.format.schema",
        )
