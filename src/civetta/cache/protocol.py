"""The continuation cache as the step loop sees it. No torch, no clock, no threads here.

How the loop uses it, per request:

    point = cache.find(prompt_ids, images)     lookup; nothing is held, nothing is changed
    restore = cache.begin(point, session)      `session` is new and empty
    while not restore.advance(): ...           RAM: True at once. Disk: False while bytes arrive,
                                               other requests go on meanwhile
    restore.tokens                             prompt tokens that need no work; may be fewer than
                                               `point.cached_tokens` when a stored byte was bad;
                                               that state is gone then, `find` has the next best
    ... prefill from there, but let a launch end at every position of `point.keep_at` ...
    cache.keep(session, KeepKind.PROMPT, images)   at each of them, and at the prompt's end
    cache.keep(session, KeepKind.REPLY, images)    when the reply ends, also when it was cut off

Keeping is advice: it never raises for lack of room and never delays the step by more than the copy
of the small state. A launch that ends at `keep_at` changes no bit of any reply (design.md section
2), and neither does a restore. Everything but `stats` is for the step thread.

When the page pool is short, `make_room(pages)` gives cached pages up before any request has to go
back to the queue: call it when `Session.reserve` raises EngineBusy, then reserve again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.state.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMark:
    """An image of a prompt: place of its first token, and the digest of what the model sees of it.

    The digest covers pixels after preprocessing and the vision weights, at least 16 bytes.
    """

    position: int
    digest: bytes


class Tier(StrEnum):
    """Where a restore point lies."""

    NONE = "none"
    RAM = "ram"
    DISK = "disk"


class KeepKind(StrEnum):
    """Why a state is kept; for the log. What goes first is decided by what it is worth."""

    PROMPT = "prompt"  # at a position of `keep_at`, or at the prompt's end
    REPLY = "reply"  # at the end of a reply, whole or cut off
    SHARED = "shared"  # where other requests wait for this very prefix


class MissReason(StrEnum):
    """Why less than the whole known prefix was reused, or the prefix is not longer."""

    COLD = "cold"  # nothing like this prompt was seen
    DIVERGED = "diverged"  # what was seen differs from token `miss_token` on
    IMAGES = "images"  # the tokens agree, the image at `miss_token` is another one
    EVICTED = "evicted"  # the state was kept once and had to go
    NO_POINT = "no_point"  # no state was ever kept so deep; it will be now
    DAMAGED = "damaged"  # the stored bytes were bad or unreadable
    DISABLED = "disabled"  # the cache is off, or the request asked to pass it


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePoint:
    """The deepest state that helps with a prompt; `cached_tokens` 0 with tier NONE means none.

    `cached_tokens` is less than the prompt's length: one row at least is computed, for its logits.
    `keep_at`: ascending positions, above `cached_tokens` and at most the prompt's length (the last
    one), where a launch should end and `keep` be called. `miss` is None when all that is known of
    this prompt is reused; `miss_token` is the first token whose state is known but not reused, or
    where the prompt parts from what was seen. `entry` names the state for `begin`; opaque.
    """

    cached_tokens: int
    tier: Tier = Tier.NONE
    keep_at: tuple[int, ...] = ()
    miss: MissReason | None = None
    miss_token: int | None = None
    entry: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Totals since the start, and what is held now. Bytes count a shared page once."""

    entries_ram: int = 0
    entries_disk: int = 0
    ram_bytes: int = 0
    ram_budget_bytes: int = 0
    disk_bytes: int = 0
    disk_budget_bytes: int = 0
    disk_queue: int = 0  # states waiting to be written
    hits_ram_total: int = 0
    hits_disk_total: int = 0
    misses_total: int = 0
    kept_total: int = 0
    refused_total: int = 0  # states that were not kept for lack of room
    evicted_total: int = 0
    damaged_total: int = 0


class Restore(Protocol):
    """A restore under way. Exactly one of: advanced until True, or cancelled."""

    @property
    def tokens(self) -> int:
        """Tokens in the session once `advance` has returned True."""
        ...

    @property
    def miss(self) -> MissReason | None:
        """DAMAGED when the state could not be used; the session is then empty and usable."""
        ...

    def advance(self) -> bool:
        """Move on without waiting; True when done. Raises EngineBusy when pages run out.

        After EngineBusy the session is empty and usable, and the restore is over.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until `advance` has something to do, for a loop without other work."""
        ...

    def cancel(self) -> None:
        """Stop; the session may be closed afterwards. Idempotent, also after the end."""
        ...


class ContinuationCache(Protocol):
    """Finds and keeps states of sequences, in RAM and on disk."""

    def find(self, tokens: Sequence[int], images: Sequence[ImageMark] = ()) -> RestorePoint:
        """The deepest usable state for a prompt, and where new ones are wanted.

        `tokens` is the whole prompt, at least one token; `images` ascend by position.
        """
        ...

    def begin(self, point: RestorePoint, session: Session) -> Restore:
        """Start to fill an empty session from `point`, which `find` returned.

        The state may have gone since: the restore then ends with 0 tokens. Counts hit or miss.
        """
        ...

    def keep(self, session: Session, kind: KeepKind, images: Sequence[ImageMark] = ()) -> bool:
        """Keep the session's state as it is now; whether a later `find` can use it.

        `images` are those of the whole prompt. Cheap when that very state is kept already.
        """
        ...

    def make_room(self, pages: int) -> bool:
        """Give up cached states until `pages` pages are free; False when that is not enough."""
        ...

    def stats(self) -> CacheStats:
        """Counters now; any thread, cheap."""
        ...

    def check(self) -> None:
        """Prove that the books balance."""
        ...

    def close(self, *, drain_s: float = 0.0) -> None:
        """Write what is queued for at most `drain_s` seconds, then let go of everything."""
        ...
