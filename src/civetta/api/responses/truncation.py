"""`truncation: auto`: a conversation that does not fit loses its oldest turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from civetta.errors import ContextOverflow

if TYPE_CHECKING:
    from civetta.chat.message import Conversation, Message
    from civetta.engine.client import ChatClient, ReplyOptions, ReplyStream


async def generate_truncated(
    client: ChatClient, conversation: Conversation, options: ReplyOptions
) -> ReplyStream:
    """Queue a reply to as much of the conversation as fits.

    Whole turns go, the oldest first; system messages and the last turn stay. Raises as
    `ChatClient.generate`, so ContextOverflow when even that is too long.
    """
    while True:
        try:
            return await client.generate(conversation, options)
        except ContextOverflow as error:
            shorter = _shortened(conversation, error)
            if shorter is None:
                raise
            conversation = shorter


def _shortened(conversation: Conversation, error: ContextOverflow) -> Conversation | None:
    """Without the turns that the overflow, by its share of the text, calls for; at least one."""
    head = [m for m in conversation.messages if m.role in ("system", "developer")]
    turns = _turns([m for m in conversation.messages if m.role not in ("system", "developer")])
    if len(turns) < 2:
        return None
    sizes = list(accumulate(sum(len(m.text) + 1 for m in turn) for turn in turns))
    share = 1 - error.context_tokens / max(error.prompt_tokens, 1)
    # Half of the estimate: what goes without need is lost, one more try costs a rendering.
    dropped = 1 + sum(size < share * sizes[-1] / 2 for size in sizes[:-2])
    rest = [message for turn in turns[dropped:] for message in turn]
    return replace(conversation, messages=(*head, *rest))


def _turns(messages: list[Message]) -> list[list[Message]]:
    """Each begins with a user's message and has what was said and done on it."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns
