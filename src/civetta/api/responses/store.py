"""Responses kept for later, in one SQLite file: `--store DIR`.

All work with the file is done by one thread, in the order it was asked for: a response that a
client has seen the end of is there when its next request asks. A response that cannot be written
is logged and missing later; the reply itself does not fail.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from civetta.errors import StoreUnusable
from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")
FILE_NAME = "responses.sqlite3"
FORMAT = 1
BUSY_S = 10.0
DAY_S = 86_400
_SCHEMA = """
CREATE TABLE responses (
  id TEXT PRIMARY KEY, created_s INTEGER NOT NULL, previous_id TEXT,
  input TEXT NOT NULL, response TEXT NOT NULL
);
CREATE INDEX responses_by_age ON responses (created_s);
"""
_CHAIN = """
WITH RECURSIVE chain (id, previous_id, input, response, depth) AS (
  SELECT id, previous_id, input, response, 0 FROM responses WHERE id = ?
  UNION ALL
  SELECT r.id, r.previous_id, r.input, r.response, depth + 1
  FROM responses r JOIN chain ON r.id = chain.previous_id
)
SELECT previous_id, input, response FROM chain ORDER BY depth DESC
"""
_log = logging.getLogger("civetta.api")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One response with the input items that its own request brought."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]

    @property
    def items(self) -> list[dict[str, Any]]:
        """What a request that goes on from it inherits, without what came before."""
        output: list[dict[str, Any]] = self.response["output"]
        return self.input_items + output


class ResponseStore:
    """Keeps responses in `folder` for `days` (0: until they are deleted).

    Raises StoreUnusable when the file cannot be opened.
    """

    def __init__(self, folder: Path, *, days: int) -> None:
        self._path = folder / FILE_NAME
        self._keep_s = days * DAY_S
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="civetta-store")
        try:
            self._base: sqlite3.Connection = self._thread.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise StoreUnusable(
                f"The responses in {folder} cannot be opened ({error}): give another --store."
            ) from error

    def put(self, stored: Stored) -> None:
        """Keep a response; it is written soon."""
        self._thread.submit(self._logged, lambda: self._put(stored))

    async def get(self, response_id: str) -> Stored | None:
        """The response of that id."""
        return await self._ask(lambda: self._get(response_id))

    async def chain(self, response_id: str) -> list[Stored] | None:
        """It and all before it, oldest first; None when one of them is not there."""
        return await self._ask(lambda: self._chain(response_id))

    async def delete(self, response_id: str) -> bool:
        """Forget it; False when it is not there."""
        return await self._ask(lambda: self._delete(response_id))

    def close(self) -> None:
        """Write what is left, close the file; idempotent."""
        try:
            self._thread.submit(self._base.close)
        except RuntimeError:  # closed before
            return
        self._thread.shutdown()

    async def _ask(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # ---- on the thread -------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.touch(mode=0o600)  # it has what people wrote
        base = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            base.execute("PRAGMA journal_mode = WAL")
            base.execute("PRAGMA synchronous = NORMAL")
            base.execute("BEGIN IMMEDIATE")
            (found,) = base.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT):
                raise sqlite3.DatabaseError(f"it has format {found}, this version has {FORMAT}")
            if not found:
                for statement in _SCHEMA.split(";"):
                    base.execute(statement)
                base.execute(f"PRAGMA user_version = {FORMAT}")
            base.execute("COMMIT")
        except sqlite3.Error:
            base.close()
            raise
        return base

    def _logged(self, work: Callable[[], None]) -> None:
        try:
            work()
        except sqlite3.Error as error:
            log_event(_log, logging.ERROR, "response_not_kept", reason=str(error))

    def _put(self, stored: Stored) -> None:
        response = stored.response
        if self._keep_s:
            oldest_s = int(time.time()) - self._keep_s
            self._base.execute("DELETE FROM responses WHERE created_s < ?", (oldest_s,))
        self._base.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
            (
                response["id"],
                response["created_at"],
                response["previous_response_id"],
                _text(stored.input_items),
                _text(response),
            ),
        )

    def _get(self, response_id: str) -> Stored | None:
        row = self._base.execute(
            "SELECT input, response FROM responses WHERE id = ?", (response_id,)
        ).fetchone()
        return None if row is None else _stored(*row)

    def _chain(self, response_id: str) -> list[Stored] | None:
        rows = self._base.execute(_CHAIN, (response_id,)).fetchall()
        if not rows or rows[0][0] is not None:  # the oldest that is there has one before it
            return None
        return [_stored(given, response) for _, given, response in rows]

    def _delete(self, response_id: str) -> bool:
        done = self._base.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        return done.rowcount > 0


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _stored(given: str, response: str) -> Stored:
    return Stored(response=json.loads(response), input_items=json.loads(given))
