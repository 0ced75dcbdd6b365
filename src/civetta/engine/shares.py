"""Fair shares between clients: tickets for the queue, token accounts for prefills.

Both are start-time fair queueing (Goyal, Vin, Cheng 1996): what a client gets is tagged with a
virtual time that advances with service, the lowest tag goes first, and a client that comes back
starts at the present virtual time, so that neither an absence nor a burst buys anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class QueueTickets:
    """Numbers for the queue: a client's n-th waiting request stands among the others' n-th."""

    def __init__(self) -> None:
        self._now = 0
        self._last: dict[str, int] = {}

    def take(self, client_id: str) -> int:
        """The ticket of a client's next request."""
        ticket = max(self._now, self._last.get(client_id, 0)) + 1
        self._last[client_id] = ticket
        return ticket

    def used(self, ticket: int) -> None:
        """Tell that the holder of a ticket left the queue to be served."""
        self._now = max(self._now, ticket)
        # A client at or behind the present time is as good as a new one.
        self._last = {client: last for client, last in self._last.items() if last > self._now}


class PrefillShares:
    """Prompt tokens that each client was given, on one common scale."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def of(self, clients: Collection[str]) -> dict[str, int]:
        """The accounts of those clients; who is not among them loses its account.

        A client without an account starts level with the one that was given least.
        """
        known = {client: self._tokens[client] for client in clients if client in self._tokens}
        start = min(known.values(), default=0)
        self._tokens = {client: known.get(client, start) for client in clients}
        return dict(self._tokens)

    def give(self, client_id: str, n_tokens: int) -> None:
        """Note that a client was given prompt tokens."""
        self._tokens[client_id] = self._tokens.get(client_id, 0) + n_tokens
