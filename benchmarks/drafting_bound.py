"""Requests whose replies are bound, for the programs about drafting: to a JSON schema, to tool calls.

They go through `ChatClient`, as those of the HTTP dialects do. Prompts are told apart by their
names and numbers; every third tool request names the tool, every third asks for any call, and the
others leave the choice to the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from civetta.chat.answer_format import AnswerFormat, ToolChoice
from civetta.chat.message import Conversation, ToolSpec, text_message
from civetta.chat.template import TemplateOptions
from civetta.engine.client import ChatClient, ReplyOptions

if TYPE_CHECKING:
    from civetta.engine.engine import Engine
    from civetta.engine.protocol import GenerateRequest
    from civetta.types import SamplingParams

NAMES = ("Anna", "Boris", "Clara", "David", "Ella", "Felix", "Greta", "Hugo")
CITIES = ("Paris", "Oslo", "Rome", "Vienna", "Lisbon")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 16},
        "kind": {"enum": ["guest", "member"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TOOLS = (
    ToolSpec(
        name="get_weather",
        description="Get the weather of a city.",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city"],
        },
    ),
    ToolSpec(
        name="send_email",
        description="Send an email.",
        parameters={
            "type": "object",
            "properties": {"to": {"type": "string"}, "urgent": {"type": "boolean"}},
            "required": ["to"],
        },
    ),
)
CHOICES = (
    ToolChoice(mode="named", name="get_weather"),
    ToolChoice(mode="required"),
    ToolChoice(mode="auto"),
)
BOUND = ("schema", "tools")


def bound_request(
    engine: Engine, kind: str, number: int, sampling: SamplingParams, tokens: int
) -> GenerateRequest:
    """Request `number` of a kind of BOUND; thinking is off, and the reply ends where it ends."""
    name, city = NAMES[number % len(NAMES)], CITIES[number % len(CITIES)]
    if kind == "schema":
        asked = f"Return a JSON object with name {name}, age {20 + number % 60} and city {city}."
        options = ReplyOptions(
            template=TemplateOptions(enable_thinking=False),
            answer_format=AnswerFormat(kind="json_schema", schema=SCHEMA),
        )
    else:
        asked = f"What is the weather in {city} for {1 + number % 9} days? Tell {name}."
        options = ReplyOptions(
            template=TemplateOptions(enable_thinking=False),
            tool_choice=CHOICES[number % len(CHOICES)],
        )
    talk = Conversation(
        messages=(text_message("user", asked),), tools=TOOLS if kind == "tools" else ()
    )
    request = ChatClient(engine).prepare(talk, options).request
    return replace(request, request_id=f"r{number}", sampling=sampling, max_tokens=tokens)
