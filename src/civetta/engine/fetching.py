"""Work that waits for other servers, beside the threads that everybody's requests are read on.

Whoever sends images slowly would hold one of those few threads each, until nobody is served. Here
each such request has a thread of its own, of so many at most, and the end of the process waits for
none of them.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from civetta.chat.image_source import is_fetched
from civetta.errors import EngineBusy

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.chat.message import Conversation

P = ParamSpec("P")
T = TypeVar("T")

MOST_FETCHING = 32
"""Requests whose images are fetched at the same time; more are told to come again."""

_free = threading.BoundedSemaphore(MOST_FETCHING)


async def read_beside(
    work: Callable[Concatenate[Conversation, P], T],
    conversation: Conversation,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Read a conversation on a worker thread; on one of its own where images are fetched.

    Raises what `work` raises, and EngineBusy when MOST_FETCHING are at it already.
    """
    if not any(is_fetched(part) for part in conversation.media):
        return await asyncio.to_thread(work, conversation, *args, **kwargs)
    return await _alone(partial(work, conversation, *args, **kwargs))


async def _alone(work: Callable[[], T]) -> T:
    if not _free.acquire(blocking=False):
        raise EngineBusy(
            f"Images of {MOST_FETCHING} requests are being fetched already; try again later, or send"
            " them as data URLs."
        )
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            found = context.run(work)
        except BaseException as error:  # noqa: BLE001 - the one who waits gets it
            _free.release()
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
        else:
            _free.release()
            if done.set_running_or_notify_cancel():
                done.set_result(found)

    threading.Thread(target=run, name="civetta-fetch", daemon=True).start()
    return await asyncio.wrap_future(done)
