"""A conversation rendered to the text that the model reads, with the borders of its turns.

Text that users wrote is told apart from the template's: where it spells a control token such as
`<|im_end|>`, `Rendered.literal_starts` says so, and the tokenizer can then keep it plain text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from civetta.chat.builtin import BuiltinTemplate
from civetta.chat.literal import choose_mark, marked, unmark
from civetta.chat.message import ImagePart, TextPart, normalise
from civetta.chat.sandbox import BoundedTemplate
from civetta.errors import CheckpointMalformed, RequestInvalid, TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from civetta.chat.message import Conversation, Message, ToolSpec
    from civetta.chat.sandbox_meter import TemplateLimits

EFFORTS = ("auto", "none", "minimal", "low", "medium", "high", "xhigh", "max")
# The template knows three levels and refuses others (A.10, F-21), so each goes to its nearest one;
# high goes up, as the GGUF template in circulation has it.
_TEMPLATE_EFFORT = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "xhigh",
    "xhigh": "xhigh",
    "max": "xhigh",
}
_TURN = "<|im_start|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """How to render; None leaves the choice to the template (thinking on, reasoning preserved).

    `reasoning_effort` is one of EFFORTS; "auto" is the template's default (xhigh), "none" means
    thinking off. Raises RequestInvalid with code `invalid_reasoning` for an unknown effort, an
    effort with thinking off, or "none" with thinking on.
    """

    enable_thinking: bool | None = None
    reasoning_effort: str = "auto"
    preserve_thinking: bool | None = None
    add_vision_id: bool = False
    add_generation_prompt: bool = True

    def __post_init__(self) -> None:
        effort = self.reasoning_effort
        if effort not in EFFORTS:
            _refuse_effort(f"Reasoning effort {effort!r} is unknown; use {', '.join(EFFORTS)}.")
        if effort == "none" and self.enable_thinking is True:
            _refuse_effort("Reasoning effort 'none' contradicts thinking on; give one of them.")
        if effort not in ("auto", "none") and self.enable_thinking is False:
            _refuse_effort(f"Reasoning effort {effort!r} needs thinking on; leave one of them out.")

    @property
    def thinking(self) -> bool:
        """Whether the model thinks before it answers."""
        return self.enable_thinking is not False and self.reasoning_effort != "none"

    @property
    def effort(self) -> str | None:
        """The level the template is told (low, medium, xhigh), or None for its default."""
        return _TEMPLATE_EFFORT.get(self.reasoning_effort)

    def variables(self) -> dict[str, Any]:
        """Template variables; what is left to the template is absent, not None."""
        values: dict[str, Any] = {
            "add_vision_id": self.add_vision_id,
            "add_generation_prompt": self.add_generation_prompt,
        }
        if self.enable_thinking is not None or not self.thinking:
            values["enable_thinking"] = self.thinking
        if self.effort is not None:
            values["reasoning_effort"] = self.effort
        if self.preserve_thinking is not None:
            values["preserve_thinking"] = self.preserve_thinking
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Characters [start, end) of one turn; `role` is what the text calls it."""

    start: int
    end: int
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A rendered conversation.

    `spans` tile the text turn by turn (consecutive tool results are one turn; the last one is the
    generation prompt, if asked for): good places for a snapshot. `literal_starts` are the offsets
    where a user's text has "<|"; give them to `Tokenizer.encode`. `opens_thinking`: the reply
    begins inside a thought, so a ReplyParser starts in reasoning.
    """

    text: str
    spans: tuple[Span, ...]
    literal_starts: frozenset[int]
    opens_thinking: bool


class _Renderer(Protocol):
    def render(self, variables: Mapping[str, Any]) -> str: ...


class ChatTemplate:
    """The chat template of a checkpoint, or the built-in one; immutable, safe between threads.

    `source` is Jinja text, None for the built-in renderer. `named_tokens` (bos_token, eos_token,
    ...) become template variables. Raises CheckpointMalformed when `source` does not compile.
    """

    def __init__(
        self,
        source: str | None = None,
        *,
        named_tokens: Mapping[str, str] | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        self.source = source
        self._named = dict(named_tokens or {})
        self._renderer: _Renderer = (
            BuiltinTemplate() if source is None else BoundedTemplate(source, limits=limits)
        )

    @property
    def is_builtin(self) -> bool:
        """Whether the checkpoint brought no template."""
        return self.source is None

    @classmethod
    def from_folder(cls, folder: Path, *, named_tokens: Mapping[str, str] | None = None) -> Self:
        """The template in a Hugging Face folder: chat_template.jinja, chat_template.json, or
        tokenizer_config.json, in this order; the built-in one when none has it.

        Raises CheckpointMalformed for a file that cannot be read or does not compile.
        """
        jinja = folder / "chat_template.jinja"
        if jinja.exists():
            return cls(_read_text(jinja), named_tokens=named_tokens)
        for name in ("chat_template.json", "tokenizer_config.json"):
            source = _template_in(folder / name)
            if source is not None:
                return cls(source, named_tokens=named_tokens)
        return cls(named_tokens=named_tokens)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], *, named_tokens: Mapping[str, str] | None = None
    ) -> Self:
        """The template in GGUF metadata, or the built-in one; raises CheckpointMalformed."""
        source = metadata.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            raise CheckpointMalformed("tokenizer.chat_template in the GGUF metadata is no text.")
        return cls(source, named_tokens=named_tokens)

    def render(
        self, conversation: Conversation, options: TemplateOptions | None = None
    ) -> Rendered:
        """The text of `conversation`, which is normalised first.

        Raises RequestInvalid as `normalise` does, and TemplateError when the template refuses.
        """
        options = options or TemplateOptions()
        try:
            text, literals = self._text_of(normalise(conversation), options)
        except RecursionError as error:
            raise TemplateError(
                "The messages or tools are nested too deeply.", param="messages"
            ) from error
        _check_unicode(text)
        return Rendered(
            text=text,
            spans=_turns(text, literals),
            literal_starts=literals,
            opens_thinking=options.add_generation_prompt and text.rstrip().endswith("<think>"),
        )

    def _text_of(
        self, conversation: Conversation, options: TemplateOptions
    ) -> tuple[str, frozenset[int]]:
        messages = [_plain_message(message) for message in conversation.messages]
        tools = [_plain_tool(tool) for tool in conversation.tools]
        mark = choose_mark([messages, tools])
        variables = {
            **self._named,
            **options.variables(),
            "messages": marked(messages, mark),
            "tools": marked(tools, mark) or None,
        }
        return unmark(self._renderer.render(variables), mark)


def _refuse_effort(sentence: str) -> None:
    raise RequestInvalid(sentence, param="reasoning_effort", code="invalid_reasoning")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointMalformed(f"{path} cannot be read as text: {error}.") from error


def _template_in(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        document = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointMalformed(
            f"{path} is not valid JSON: {error}; download it again."
        ) from error
    value = document.get("chat_template") if isinstance(document, dict) else None
    if isinstance(value, list):  # several templates by name
        entries = [entry for entry in value if isinstance(entry, dict)]
        default = [entry for entry in entries if entry.get("name") == "default"]
        value = default[-1].get("template") if default else None
    if value is not None and not isinstance(value, str):
        raise CheckpointMalformed(f"chat_template in {path} is no text.")
    return value


def _plain_message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _plain_content(message)}
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.mapping)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _plain_content(message: Message) -> str | list[dict[str, str]]:
    if not message.media:
        return message.text
    content: list[dict[str, str]] = []
    for part in message.parts:
        if not isinstance(part, TextPart):
            content.append({"type": "image" if isinstance(part, ImagePart) else "video"})
        elif (
            content and content[-1]["type"] == "text"
        ):  # so that no control token forms between two
            content[-1]["text"] += part.text
        else:
            content.append({"type": "text", "text": part.text})
    return content


def _plain_tool(tool: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateError(
            f"The messages have half of a surrogate pair ({text[error.start]!a}); send valid"
            " Unicode.",
            param="messages",
        ) from error


def _turns(text: str, literals: frozenset[int]) -> tuple[Span, ...]:
    starts: list[int] = []
    place = text.find(_TURN)
    while place >= 0:
        if place not in literals:
            starts.append(place)
        place = text.find(_TURN, place + 1)
    if not starts:
        return (Span(start=0, end=len(text), role=""),)
    spans = []
    for index, start in enumerate(starts):
        end = starts[index + 1] if index + 1 < len(starts) else len(text)
        role = text[start + len(_TURN) : end].partition("\n")[0]
        spans.append(Span(start=start if index else 0, end=end, role=role))
    return tuple(spans)
