"""Restores: from RAM at once, from disk as the bytes arrive.

A disk restore reads on a thread of its own, a bounded number of runs ahead. The step thread takes
one run a call and copies it into pages, so that no step waits for the disk.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from civetta.cache.disk_format import BadEntry
from civetta.cache.protocol import MissReason
from civetta.errors import EngineBusy
from civetta.state.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.cache.disk import DiskTier
    from civetta.state.pages import PagePool
    from civetta.state.session import Session
    from civetta.state.snapshot import SmallState

_log = logging.getLogger(__name__)
AHEAD = 2
"""Pieces that are read before the step thread asks for them."""


class RamRestore:
    """A restore that is over: what RAM had was shared and copied on the spot."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.miss: MissReason | None = None

    def advance(self) -> bool:
        """Done."""
        return True

    def wait(self, timeout_s: float) -> None:
        """There is nothing to wait for."""

    def cancel(self) -> None:
        """Nothing to stop."""


class _Reader:
    """The thread's side: small state, runs, then None; or the error that ended it."""

    def __init__(self, disk: DiskTier, key: str) -> None:
        self._disk, self._key = disk, key
        self._changed = threading.Condition()
        self._pieces: deque[SmallState | bytes | Exception | None] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="civetta-cache-read", daemon=True)
        self._thread.start()

    def take(self) -> tuple[bool, SmallState | bytes | Exception | None]:
        """The next piece, if it is there."""
        with self._changed:
            if not self._pieces:
                return False, None
            piece = self._pieces.popleft()
            self._changed.notify_all()
            return True, piece

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._stopped, timeout_s)

    def stop(self) -> None:
        """Read no further; does not wait for the read that is under way."""
        with self._changed:
            self._stopped = True
            self._pieces.clear()
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    def _put(self, piece: SmallState | bytes | Exception | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._pieces) < AHEAD)
            if not self._stopped:
                self._pieces.append(piece)
                self._changed.notify_all()
            return not self._stopped

    def _run(self) -> None:
        try:
            entry, small = self._disk.read_small(self._key)
            if not self._put(small):
                return
            for run in entry.head.runs:
                if not self._put(self._disk.read_run(run)):
                    return
            self._put(None)
        except (OSError, BadEntry) as error:
            if not self._stopped:  # an entry that nobody waits for may have gone by rights
                self._disk.drop_damaged(self._key, error)
            self._put(error)
        except Exception as error:  # noqa: BLE001 - a thread's root: handed to the step thread
            _log.exception("cache_read_failed")
            self._put(error)


class DiskRestore:
    """Fills an empty session from disk; ends with `ended(snapshot)`, or None when it failed.

    The snapshot is then the receiver's. `make_room` frees pages where the pool is short.
    """

    def __init__(
        self,
        disk: DiskTier,
        key: str,
        *,
        session: Session,
        tokens: int,
        make_room: Callable[[int], bool],
        ended: Callable[[DiskRestore, Snapshot | None], None],
    ) -> None:
        self.tokens = 0
        self.miss: MissReason | None = None
        self.key = key
        self._disk, self._session, self._wanted = disk, session, tokens
        self._make_room, self._ended = make_room, ended
        self._pool: PagePool = session.pool
        self._small: SmallState | None = None
        self._pages: list[int] = []
        self._over = False
        self._reader = _Reader(disk, key)

    def advance(self) -> bool:
        """Take one piece if it is there; True when done. Raises EngineBusy, then it is over."""
        if self._over:
            return True
        there, piece = self._reader.take()
        if not there:
            return False
        try:
            if piece is None:
                self._finish()
            elif isinstance(piece, Exception):
                self.miss = MissReason.DAMAGED
                self._end(None)
            elif isinstance(piece, bytes):
                self._put_pages(piece)
            else:
                self._small = piece
        except EngineBusy:
            self._end(None)
            raise
        return self._over

    def wait(self, timeout_s: float) -> None:
        """Block until a piece is there."""
        if not self._over:
            self._reader.wait(timeout_s)

    def cancel(self) -> None:
        """Stop reading and give the pages back; idempotent."""
        if not self._over:
            self._end(None)

    def join(self) -> None:
        """Wait until the reading thread has ended; after `cancel`."""
        self._reader.join()

    def _put_pages(self, data: bytes) -> None:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pages = flat.view(-1, self._pool.page_bytes)
        if self._pool.free_pages < len(pages):
            self._make_room(len(pages))
        self._pool.require(len(pages))
        for page_data in pages:
            page = self._pool.take()
            self._pages.append(page)
            self._pool.write(page, page_data)

    def _finish(self) -> None:
        assert self._small is not None, "runs came before the small state"
        snapshot = Snapshot(self._small, tuple(self._pages), self._pool)
        self._pages = []
        try:
            self._session.restore(snapshot, self._wanted)
        except BaseException:
            snapshot.close()
            raise
        self.tokens = self._wanted
        self._end(snapshot)

    def _end(self, snapshot: Snapshot | None) -> None:
        self._over = True
        self._reader.stop()
        for page in self._pages:
            self._pool.drop(page)
        self._pages = []
        self._ended(self, snapshot)
