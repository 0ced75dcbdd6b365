"""Several generations for one request: merged while they run, and one reply made of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from civetta.api.accounting import accounts, server_timing
from civetta.api.wire import event
from civetta.engine.protocol import Progress
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from civetta.api.delivery import Generation
    from civetta.types import Usage

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
MAX_CHOICES = 128
_UNREAD = 64
"""Events of all choices that wait to be read; beyond that they wait with the engine."""


@dataclass(frozen=True, slots=True)
class Numbered(Generic[E]):
    """An event of choice number `index`."""

    index: int
    item: E


def check_choices(n: int | None, *, prompts: int = 1, best_of: int | None = None) -> int:
    """Choices for each prompt. Raises RequestInvalid naming the field at fault."""
    count = 1 if n is None else n
    if count < 1 or count * prompts > MAX_CHOICES:
        raise RequestInvalid(
            f"n is {count}"
            + (f" for {prompts} prompts" if prompts > 1 else "")
            + f": give a whole number of at least 1, and {MAX_CHOICES} choices together at most.",
            param="n",
        )
    if best_of is not None and best_of != count:
        raise RequestInvalid(
            f"best_of is {best_of}: choices are not compared, so that it has to equal n, {count}.",
            param="best_of",
        )
    return count


class Choices(Generic[E]):
    """Generations side by side; their events come in whatever order they are made."""

    def __init__(self, generations: Sequence[Generation[E]]) -> None:
        self._generations = generations

    def cancel(self) -> None:
        """Stop them all."""
        for generation in self._generations:
            generation.cancel()

    async def __aiter__(self) -> AsyncIterator[Numbered[E]]:
        """Numbered events; the first failure ends all, and is raised."""
        events: asyncio.Queue[Numbered[E] | BaseException | None] = asyncio.Queue(_UNREAD)
        tasks = [
            asyncio.create_task(_forward(index, generation, events))
            for index, generation in enumerate(self._generations)
        ]
        running = len(tasks)
        try:
            while running:
                found = await events.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    running -= 1
                else:
                    yield found
        finally:
            self.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    index: int,
    generation: Generation[E],
    events: asyncio.Queue[Numbered[E] | BaseException | None],
) -> None:
    try:
        async for item in generation:
            await events.put(Numbered(index, item))
    except Exception as error:  # noqa: BLE001 - raised again by whoever reads the queue
        await events.put(error)
    else:
        await events.put(None)


class ChoiceEncoder(Protocol[E_contra]):
    """An encoder of one choice, as `ChoicesEncoder` needs it; it was told its index."""

    def frames(self, item: E_contra) -> bytes:
        """Server-sent events for one event, possibly none."""
        ...

    def gather(self, item: E_contra) -> None:
        """Take one event into the whole reply."""
        ...

    def body(self) -> dict[str, Any]:
        """The gathered reply with this choice alone."""
        ...

    @property
    def usage(self) -> Usage | None:
        """What it took; None before its end."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk that ends a stream with its usage."""
        ...


class ChoicesEncoder(Generic[E]):
    """One reply of several choices; `per_prompt` of them share each prompt."""

    def __init__(
        self, encoders: Sequence[ChoiceEncoder[E]], *, per_prompt: int, include_usage: bool
    ) -> None:
        self._encoders, self._per_prompt = encoders, per_prompt
        self._include_usage = include_usage

    def frames(self, item: Numbered[E]) -> bytes:
        """The choice's own events; the usage of all behind the last one's end."""
        if isinstance(item.item, Progress) and item.index:
            return b""
        encoder = self._encoders[item.index]
        ended = encoder.usage is not None
        frames = encoder.frames(item.item)
        usage = self._usage()
        if usage is not None and not ended and self._include_usage:
            frames += event(encoder.usage_chunk(usage))
        return frames

    def gather(self, item: Numbered[E]) -> None:
        """Take one event into the whole reply."""
        self._encoders[item.index].gather(item.item)

    def body(self) -> object:
        """One object with all choices."""
        usage = self._usage()
        assert usage is not None, "every choice has ended"
        bodies = [encoder.body() for encoder in self._encoders]
        return {
            **bodies[0],
            "choices": [choice for body in bodies for choice in body["choices"]],
            **accounts(usage),
        }

    def headers(self) -> dict[str, str]:
        """The durations."""
        usage = self._usage()
        assert usage is not None, "every choice has ended"
        return {"Server-Timing": server_timing(usage)}

    def _usage(self) -> Usage | None:
        found = [usage for encoder in self._encoders if (usage := encoder.usage) is not None]
        if len(found) < len(self._encoders):
            return None
        return together(found, per_prompt=self._per_prompt)


def together(usages: Sequence[Usage], *, per_prompt: int) -> Usage:
    """What all choices took: each prompt counts once, durations are the longest one's."""
    prompts = usages[::per_prompt]
    return replace(
        usages[0],
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        draft_tokens=sum(usage.draft_tokens for usage in usages),
        draft_tokens_accepted=sum(usage.draft_tokens_accepted for usage in usages),
        draft_depths=_depths(usages),
        queue_s=max(usage.queue_s for usage in usages),
        prefill_s=max(usage.prefill_s for usage in usages),
        decode_s=max(usage.decode_s for usage in usages),
    )


def _depths(usages: Sequence[Usage]) -> tuple[tuple[int, int], ...]:
    """Drafted and accepted by depth, of all choices together."""
    by_depth = zip_longest(*(usage.draft_depths for usage in usages), fillvalue=(0, 0))
    return tuple((sum(d for d, _ in one), sum(a for _, a in one)) for one in by_depth)
