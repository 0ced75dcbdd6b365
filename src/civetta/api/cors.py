"""Which web pages may use the API: the CORS protocol for a list of origins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from civetta.errors import OriginRefused

if TYPE_CHECKING:
    from starlette.datastructures import Headers

_METHODS = "GET, POST, DELETE, OPTIONS"
_SENT = "Authorization, Content-Type, X-API-Key, Anthropic-Version, Anthropic-Beta"
_READ = "X-Request-ID, Server-Timing, X-Civetta-Ignored, Retry-After"
_KEPT_S = "86400"


class Cors:
    """Answers preflights and marks responses. `origins` are exact texts; `*` is every origin."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._every = "*" in origins
        self._origins = frozenset(origins)

    def headers(self, headers: Headers) -> dict[str, str]:
        """What a response to these request headers has to carry, often nothing."""
        allowed = self._allowed(headers.get("origin"))
        if allowed is None:
            return {"Vary": "Origin"} if self._origins and not self._every else {}
        marks = {
            "Access-Control-Allow-Origin": allowed,
            "Access-Control-Expose-Headers": _READ,
        }
        return marks if self._every else {**marks, "Vary": "Origin"}

    def preflight(self, method: str, headers: Headers) -> Response | None:
        """The answer to a browser that asks before it sends; None for any other request.

        Raises OriginRefused for an origin that is not on the list.
        """
        wanted = "access-control-request-method" in headers
        if method != "OPTIONS" or "origin" not in headers or not wanted:
            return None
        if self._allowed(headers["origin"]) is None:
            raise OriginRefused(
                "Web pages of this origin may not use the server: start it with --cors-origin and"
                " the page's origin."
            )
        named = headers.get("access-control-request-headers", "")
        answer = {
            "Access-Control-Allow-Methods": _METHODS,
            # A client's own x- headers are harmless; what it asks for is what it may send.
            "Access-Control-Allow-Headers": named if _harmless(named) else _SENT,
            "Access-Control-Max-Age": _KEPT_S,
        }
        return Response(status_code=204, headers=answer)

    def _allowed(self, origin: str | None) -> str | None:
        if origin is None:
            return None
        if self._every:
            return "*"
        return origin if origin in self._origins else None


def _harmless(names: str) -> bool:
    """Whether it is a short list of header names, safe to send back."""
    return 0 < len(names) <= 2000 and all(mark.isalnum() or mark in "-_, " for mark in names)
