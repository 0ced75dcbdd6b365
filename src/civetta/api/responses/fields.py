"""The body of POST /v1/responses; its items and tools are read one by one in `items` and `tools`.

Fields of hosted services (caching, billing, moderation, labels) are taken and change nothing; a
field that would change a reply, and that civetta does not act on, is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from civetta.api.chat_fields import TemplateFields  # noqa: TC001 - msgspec resolves it
from civetta.api.fields import SamplingFields, logprobs_in_range, missing, neutral, refuse
from civetta.api.format_fields import FormatFields, SchemaFields, format_of
from civetta.chat.template import EFFORTS
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from civetta.chat.answer_format import AnswerFormat

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# What may be asked to be included; all but these two belong to things that never appear.
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        SEALED,
        "message.input_image.image_url",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
SUMMARIES = ("auto", "concise", "detailed")


class ReasoningFields(msgspec.Struct, kw_only=True):
    """`reasoning`: how hard to think, and in which form to show it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the older spelling of summary
    context: str | None = None
    mode: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """`text.format`: a JSON schema stands in it directly; name and description are labels."""

    type: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    name: str | None = None
    description: str | None = None
    regex: str | None = None
    lark: str | None = None


class TextFields(msgspec.Struct, kw_only=True):
    """`text`: the form of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = None


class StreamFields(msgspec.Struct, kw_only=True):
    """`stream_options`: padding against traffic analysis, which is never added."""

    include_obfuscation: bool | None = None


class ResponsesFields(SamplingFields, kw_only=True):
    """The body of a request; all of it is optional, also in POST /v1/responses/input_tokens."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    truncation: str | None = None
    chat_template_kwargs: TemplateFields | None = None
    stream: bool | None = None
    stream_options: StreamFields | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    cache_prompt: bool | None = None
    # Labels and wishes of a hosted service; they never change a reply.
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # bounds hosted tools, of which there are none
    # Taken at their neutral values.
    background: bool | None = None
    service_tier: str | None = None
    prompt: Any = None
    moderation: Any = None
    context_management: list[Any] | None = None
    access_programs: Any = None
    background_options: Any = None
    image: Any = None
    conversation: Any = None

    def check(self) -> None:
        """Refuse what is not supported; raises RequestInvalid naming the field."""
        self._check_reasoning()
        neutral("background", self.background, False, "a reply is given on its own connection")
        if self.conversation is not None:
            refuse("conversation", "conversations are continued by previous_response_id")
        if self.truncation not in (None, "auto", "disabled"):
            refuse("truncation", "only auto and disabled are accepted")
        if self.service_tier not in (None, "auto", "default"):
            refuse("service_tier", "there is one tier, so only auto and default are accepted")
        if self.context_management:
            refuse("context_management", "the server does not rewrite conversations; leave it out")
        for name in ("prompt", "moderation", "access_programs", "background_options", "image"):
            if getattr(self, name) is not None:
                refuse(name, "it is not supported; leave it out")
        for index, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                refuse(f"include[{index}]", f"{name[:60]!r} is not known")

    def _check_reasoning(self) -> None:
        reasoning = self.reasoning or ReasoningFields()
        if reasoning.effort not in (None, *EFFORTS):
            raise RequestInvalid(
                f"reasoning.effort is {str(reasoning.effort)[:40]!r}: give one of"
                f" {', '.join(EFFORTS)}.",
                param="reasoning.effort",
                code="invalid_reasoning",
            )
        if reasoning.mode not in (None, "standard"):
            refuse("reasoning.mode", "there is one mode, so only standard is accepted")
        if reasoning.context not in (None, "auto", "all_turns", "current_turn"):
            refuse("reasoning.context", "give auto, all_turns or current_turn")
        for name in ("summary", "generate_summary"):
            if getattr(reasoning, name) not in (None, *SUMMARIES):
                refuse(f"reasoning.{name}", f"give {', '.join(SUMMARIES)}")

    @property
    def summary(self) -> str | None:
        """The form of summary that was asked for."""
        reasoning = self.reasoning or ReasoningFields()
        return reasoning.summary or reasoning.generate_summary

    @property
    def wants_sealed(self) -> bool:
        """Whether thoughts come in a form that only this server reads, too."""
        return SEALED in (self.include or ())

    @property
    def keep_reasoning(self) -> bool | None:
        """Whether thoughts of earlier turns are read again; None leaves it to the server."""
        context = None if self.reasoning is None else self.reasoning.context
        return {"all_turns": True, "current_turn": False}.get(context or "")

    @property
    def answer_format(self) -> AnswerFormat | None:
        """The form that the answer has to have; None for text. Raises RequestInvalid."""
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        nested = None
        if form.type == "json_schema":
            if form.schema is None:
                missing("text.format.schema")
            nested = SchemaFields(schema=form.schema, strict=form.strict)
        asked = FormatFields(
            type=form.type,
            json_schema=nested,
            regex=form.regex,
            lark=form.lark,
            schema=form.schema if nested is None else None,
        )
        made = format_of(asked, "text.format")
        return made if made is None or nested is None else replace(made, param="text.format.schema")

    @property
    def logprob_count(self) -> int | None:
        """How many rivals to report with each token; None when logprobs are off."""
        count = self.top_logprobs or 0
        if LOGPROBS not in (self.include or ()) and not count:
            return None
        return logprobs_in_range("top_logprobs", count)
