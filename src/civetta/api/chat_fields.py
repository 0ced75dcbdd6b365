"""The body of POST /v1/chat/completions, and the conversation and template options it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from civetta.api.asking import template_for
from civetta.api.billing_line import without_billing_line
from civetta.api.fields import SharedFields, logprobs_in_range, missing, neutral, refuse
from civetta.api.format_fields import FormatFields, choice_of, format_of
from civetta.api.image_fields import ImageParts
from civetta.chat.message import Conversation, Message, TextPart, ToolCall, ToolSpec
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from civetta.chat.answer_format import AnswerFormat, ToolChoice
    from civetta.chat.message import ImagePart, Part, Role, VideoPart
    from civetta.chat.template import TemplateOptions
    from civetta.options import ReasoningOptions


class ImageUrlFields(msgspec.Struct, kw_only=True):
    """The inner object of an image part."""

    url: str
    detail: str | None = None


class VideoUrlFields(msgspec.Struct, kw_only=True):
    """The inner object of a video part."""

    url: str


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content; text, image_url, video_url and video are the kinds read.

    `video` is a list of frames, `fps` of them a second, as Qwen clients send it.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrlFields | str | None = None
    input_audio: Any = None
    file: Any = None
    video_url: VideoUrlFields | str | None = None
    video: list[str] | str | None = None
    fps: float | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """Name and arguments of a call, the latter as JSON text or as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallFields(msgspec.Struct, kw_only=True):
    """A call that the assistant made earlier."""

    function: FunctionCall
    id: str = ""
    type: str = "function"
    index: int | None = None


class MessageFields(msgspec.Struct, kw_only=True):
    """One message."""

    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another spelling of reasoning_content in circulation
    tool_calls: list[CallFields] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class FunctionFields(msgspec.Struct, kw_only=True):
    """The inner object of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parametersJsonSchema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(msgspec.Struct, kw_only=True):
    """A tool, nested as OpenAI's or flat."""

    type: str = "function"
    function: FunctionFields | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TemplateFields(msgspec.Struct, kw_only=True):
    """`chat_template_kwargs`."""

    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    preserve_thinking: bool | None = None
    add_vision_id: bool | None = None


class ThinkingFields(msgspec.Struct, kw_only=True):
    """`thinking`, in Anthropic's spelling."""

    type: str
    budget_tokens: int | None = None


class ChatFields(SharedFields, kw_only=True):
    """The body of a request."""

    messages: list[MessageFields]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolFields] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: FormatFields | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking: ThinkingFields | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: TemplateFields | None = None
    return_progress: bool | None = None
    # Labels for the operator of a service; they never change a reply.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Defined by OpenAI, taken at their neutral values.
    store: bool | None = None
    service_tier: str | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    ignore_eos: bool | None = None

    def check(self) -> None:
        """Refuse what is not supported; raises RequestInvalid naming the field."""
        self.check_neutral()
        neutral("store", self.store, False, "conversations are not kept")
        neutral("modalities", self.modalities, ["text"], "replies are text")
        neutral("verbosity", self.verbosity, "medium", "there is one verbosity")
        neutral("functions", self.functions, [], "functions are given as tools")
        neutral("ignore_eos", self.ignore_eos, False, "it belongs to /v1/completions")
        if self.service_tier not in (None, "auto", "default"):
            refuse("service_tier", "there is one tier, so only auto and default are accepted")
        if self.function_call not in (None, "none", "auto"):
            refuse("function_call", "use tool_choice")
        for name in ("audio", "prediction", "web_search_options"):
            if getattr(self, name) is not None:
                refuse(name, "it is not supported; leave it out")

    @property
    def budget(self) -> int | None:
        """Tokens of thought at most; None where the request says nothing of it."""
        inner = None if self.thinking is None else self.thinking.budget_tokens
        budget: int | None = _agreed(
            "the thinking budget", thinking_budget=self.thinking_budget, thinking=inner
        )
        return budget

    @property
    def choice(self) -> ToolChoice:
        """Whether tools are called. Raises RequestInvalid."""
        return choice_of(self.tool_choice)

    @property
    def answer_format(self) -> AnswerFormat | None:
        """The form of the answer; None for free text. Raises RequestInvalid."""
        return None if self.response_format is None else format_of(self.response_format)

    @property
    def logprob_count(self) -> int | None:
        """How many rivals to report with each token; None when logprobs are off."""
        if not self.logprobs:
            if self.top_logprobs:
                refuse("top_logprobs", "it goes with logprobs: true; send both or neither")
            return None
        return logprobs_in_range("top_logprobs", self.top_logprobs or 0)


def conversation_of(
    fields: ChatFields, *, allow_image_urls: bool = False
) -> tuple[Conversation, list[str]]:
    """The conversation, and the paths of fields that have no effect on it.

    Images are numbered through the conversation; https addresses are taken with
    `allow_image_urls`. Raises RequestInvalid for parts, tools or choices that are not supported.
    """
    unused = [
        f"messages[{index}].name"
        for index, message in enumerate(fields.messages)
        if message.name is not None and message.role != "tool"
    ]
    images = ImageParts(allow_urls=allow_image_urls)
    messages = tuple(
        _message(message, f"messages[{index}]", images)
        for index, message in enumerate(fields.messages)
    )
    messages = without_billing_line(messages)
    return Conversation(messages=messages, tools=_tools(fields)), unused


def template_options(fields: ChatFields, server: ReasoningOptions) -> TemplateOptions:
    """How to render: each value from the request, else as `template_for` says.

    Raises RequestInvalid with code `invalid_reasoning` when the request contradicts itself.
    """
    kwargs = fields.chat_template_kwargs or TemplateFields()
    think = _agreed(
        "enable_thinking",
        enable_thinking=fields.enable_thinking,
        chat_template_kwargs=kwargs.enable_thinking,
        thinking=_thinking(fields.thinking),
    )
    effort = _agreed(
        "reasoning_effort",
        reasoning_effort=fields.reasoning_effort,
        chat_template_kwargs=kwargs.reasoning_effort,
    )
    keep = _agreed(
        "preserve_thinking",
        preserve_thinking=fields.preserve_thinking,
        chat_template_kwargs=kwargs.preserve_thinking,
    )
    return template_for(
        server, think=think, effort=effort, keep=keep, add_vision_id=bool(kwargs.add_vision_id)
    )


def _message(fields: MessageFields, path: str, images: ImageParts) -> Message:
    if fields.refusal is not None or fields.audio is not None or fields.function_call is not None:
        name = next(
            key for key in ("refusal", "audio", "function_call") if getattr(fields, key) is not None
        )
        refuse(f"{path}.{name}", "it is not supported; leave it out")
    reasoning = _agreed(
        f"{path}.reasoning_content",
        reasoning_content=fields.reasoning_content,
        reasoning=fields.reasoning,
    )
    return Message(
        role=cast("Role", fields.role),  # normalise() refuses any other
        parts=_parts(fields.content, path, images),
        reasoning=reasoning,
        tool_calls=tuple(
            _call(call, f"{path}.tool_calls[{index}]")
            for index, call in enumerate(fields.tool_calls or ())
        ),
        tool_call_id=fields.tool_call_id,
    )


def _parts(
    content: str | list[ContentPart] | None, path: str, images: ImageParts
) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(text=content),)
    parts: list[Part] = []
    for index, part in enumerate(content):
        place = f"{path}.content[{index}]"
        if part.type == "image_url":
            parts.append(_image(part.image_url, f"{place}.image_url", images))
            continue
        if part.type in ("video_url", "video"):
            parts.append(_video(part, place, images))
            continue
        if part.type != "text":
            refuse(
                place,
                f"parts of type {part.type[:40]!r} are not supported; text, image_url, video_url"
                " and video are",
            )
        if part.text is None:
            missing(f"{place}.text")
        parts.append(TextPart(text=part.text))
    return tuple(parts)


def _video(part: ContentPart, place: str, images: ImageParts) -> VideoPart:
    """A data URL, or a list of frames."""
    value = part.video_url if part.type == "video_url" else part.video
    place = f"{place}.{part.type}"
    if value is None:
        missing(place)
    if isinstance(value, list):
        return images.take_frames(value, place, fps=part.fps)
    if isinstance(value, VideoUrlFields):
        return images.take_video(value.url, f"{place}.url", fps=part.fps)
    return images.take_video(value, place, fps=part.fps)


def _image(value: ImageUrlFields | str | None, place: str, images: ImageParts) -> ImagePart:
    if value is None:
        missing(place)
    if isinstance(value, str):
        return images.take(value, place)
    return images.take(value.url, f"{place}.url", detail=value.detail)


def _call(call: CallFields, path: str) -> ToolCall:
    if call.type != "function":
        refuse(f"{path}.type", "only function calls are supported")
    arguments = call.function.arguments
    return ToolCall(
        id=call.id, name=call.function.name, arguments={} if arguments is None else arguments
    )


def _tools(fields: ChatFields) -> tuple[ToolSpec, ...]:
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or ()))


def _tool(tool: ToolFields, path: str) -> ToolSpec:
    if tool.type != "function":
        refuse(f"{path}.type", f"{tool.type[:40]!r} tools are not supported, only functions are")
    inner = tool.function
    if inner is None:
        if tool.name is None:
            missing(f"{path}.function")
        return ToolSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters or {},
            strict=tool.strict,
        )
    alias = not inner.parameters and inner.parametersJsonSchema
    return ToolSpec(
        name=inner.name,
        description=inner.description,
        parameters=inner.parameters or inner.parametersJsonSchema or {},
        strict=inner.strict,
        param=f"{path}.function",
        schema_key="parametersJsonSchema" if alias else "parameters",
    )


def _thinking(fields: ThinkingFields | None) -> bool | None:
    if fields is None:
        return None
    if fields.type not in ("enabled", "disabled"):
        refuse("thinking.type", "only enabled and disabled are accepted")
    return fields.type == "enabled"


def _agreed(what: str, **values: Any) -> Any:
    """The one value that those given agree on, None when none is given."""
    given = {name: value for name, value in values.items() if value is not None}
    found = list(given.values())
    if any(value != found[0] for value in found[1:]):
        names = " and ".join(given)
        raise RequestInvalid(
            f"{names} say different things about {what}: send one of them.",
            param=next(iter(given)),
            code="invalid_reasoning",
        )
    return found[0] if found else None
