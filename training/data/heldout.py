"""Held-out prompts with expected answers, and held-out text for perplexity."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.data import chitchat, lexicon, stories
from training.data.abilities import ABILITIES
from training.data.draw import Draw, seeded
from training.data.graders import GRADERS, Call, Reply, parse_reply
from training.data.render import render_messages
from training.data.sample import Chat, Message, ToolSpec

if TYPE_CHECKING:
    import numpy as np

ROOM = {"tools": 2048, "toolbox": 2048, "retrieval": 1024}
MAX_TOKENS = {
    "copy": 160,
    "tools": 256,
    "toolbox": 256,
    "json": 256,
    "stories": 400,
    "retrieval": 96,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalItem:
    """One prompt with its expected answer.

    `messages`, `tools` and `images` are as in `Chat`, without the final reply. `expected` is a
    string, a number in digits, a tuple of `Call`, a JSON object, or a tuple of accepted texts or
    names, whichever the ability's grader takes. `max_tokens` is ample for the answer.
    """

    ability: str
    index: int
    messages: list[Message]
    tools: list[ToolSpec] | None
    enable_thinking: bool
    images: tuple[np.ndarray, ...]
    expected: Any
    max_tokens: int

    @property
    def prompt(self) -> str:
        """The rendered prompt; one `<|image_pad|>` an image, to be repeated an image token."""
        return render_messages(
            self.messages, self.tools, enable_thinking=self.enable_thinking, generation=True
        )

    def grade(self, reply: Reply) -> bool:
        """Tell whether a reply in parts is right."""
        return GRADERS[self.ability](reply, self.expected)

    def grade_text(self, text: str) -> bool:
        """Tell whether raw generated text, special tokens kept, is right."""
        return self.grade(parse_reply(text, thinking=self.enable_thinking))


def _expected(ability: str, chat: Chat) -> Any:
    last = chat.messages[-1]
    if ability in ("tools", "toolbox"):
        functions = [call["function"] for call in last["tool_calls"]]
        return tuple(Call.of(f["name"], f["arguments"]) for f in functions)
    if ability == "json":
        return json.loads(last["content"])
    if ability == "retrieval":
        return str(last["content"]).removesuffix(".").rsplit(" ", 1)[-1]
    if ability == "stories":
        return _names_asked(str(chat.messages[-2]["content"]), str(last["content"]))
    if ability == "chat":
        user = chat.messages[-2]["content"]
        return next(a for asks, a in chitchat.topics().values() if user in asks)
    return last["content"]


def _names_asked(request: str, story: str) -> tuple[str, ...]:
    """Return the names of the request that a story must mention."""
    known = {name for name in lexicon.first_names() if name in story}
    return tuple(sorted(name for name in known if name in re.findall(r"\w+", request)))


def heldout(
    ability: str,
    n: int,
    *,
    seed: int = 0,
    thinking: bool | None = False,
    tokens: int | None = None,
) -> list[EvalItem]:
    """Return `n` held-out items of an ability; item i depends on the arguments and i only.

    `tokens` is the length of a retrieval prompt (128 to 15,000); for tools it bounds the number
    of declared tools (2048, the default, gives eight). Raises KeyError for another ability.
    """
    room = tokens or ROOM.get(ability, 1024)
    items = []
    for index in range(n):
        rng = seeded("heldout", ability, seed, index, room)
        draw = Draw(rng=rng, split="heldout", room=room, single=True, thinking=thinking)
        chat = ABILITIES[ability](draw)
        assert isinstance(chat, Chat), "a single draw is a conversation"
        extra = 200 if chat.enable_thinking else 0
        items.append(
            EvalItem(
                ability=ability,
                index=index,
                messages=chat.messages[:-1],
                tools=chat.tools,
                enable_thinking=chat.enable_thinking,
                images=chat.images,
                expected=_expected(ability, chat),
                max_tokens=MAX_TOKENS.get(ability, 64) + extra,
            )
        )
    return items


def heldout_text(n: int, *, seed: int = 0) -> list[str]:
    """Return held-out stories as plain documents, for perplexity; end each with `<|endoftext|>`."""
    draws = (Draw(rng=seeded("heldout text", seed, index), split="heldout") for index in range(n))
    return [stories.tell(draw).text for draw in draws]
