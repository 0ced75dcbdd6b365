"""The `prompt` field of the endpoints that take text or token ids."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from civetta.engine.client import check_length
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from civetta.engine.protocol import EngineClient


async def prompt_ids(engine: EngineClient, prompt: str | list[Any]) -> tuple[int, ...]:
    """Ids of one text or of one list of ids; text is encoded off the event loop.

    Raises RequestInvalid for anything else.
    """
    prompt = _only(prompt)
    _check(prompt)
    if isinstance(prompt, str):
        return tuple(await asyncio.to_thread(_joined, engine, [prompt]))
    return tuple(prompt)


async def several_prompt_ids(
    engine: EngineClient, prompt: str | list[Any]
) -> list[tuple[int, ...]]:
    """Ids of one prompt or of several, each a text or a list of ids.

    Raises RequestInvalid for anything else.
    """
    several = isinstance(prompt, list) and any(isinstance(item, (str, list)) for item in prompt)
    if not several:
        return [await prompt_ids(engine, prompt)]
    for item in prompt:  # all before one is encoded
        _check(item)
    return [await prompt_ids(engine, item) for item in prompt]


async def mixed_prompt_ids(engine: EngineClient, prompt: str | list[Any]) -> tuple[int, ...]:
    """The same, where a list may also mix ids and texts, which follow one another."""
    prompt = _only(prompt)
    if isinstance(prompt, str) or all(map(_is_id, prompt)):
        return await prompt_ids(engine, prompt)
    if all(isinstance(item, str) for item in prompt) or not all(
        isinstance(item, str) or _is_id(item) for item in prompt
    ):
        raise RequestInvalid(
            "prompt has to be one text, or one list of token ids and texts: send one request a"
            " prompt.",
            param="prompt",
        )
    return tuple(await asyncio.to_thread(_joined, engine, prompt))


def _joined(engine: EngineClient, items: list[Any]) -> list[int]:
    ids: list[int] = []
    for item in items:
        if isinstance(item, str):
            check_length(engine, item)
            ids += engine.tokenizer.encode(item)
        else:
            ids.append(item)
    return ids


def _only(prompt: str | list[Any]) -> str | list[Any]:
    """The one prompt in a list of one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        return prompt[0]
    return prompt


def _check(prompt: object) -> None:
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_id, prompt))):
        return
    raise RequestInvalid(
        "prompt has to be texts or lists of token ids, one or several.", param="prompt"
    )


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
