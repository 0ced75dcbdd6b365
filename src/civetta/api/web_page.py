"""GET /: the chat page, static files that web/ builds into page/, served without a key.

The page may load nothing but what lies here, and talk to nobody but this server: its Content
Security Policy says so to the browser. Trusted Types are required and none allowed, so that no
string of a reply can become markup, whatever the page's code does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

PAGE_FOLDER = Path(__file__).with_name("page")
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_INDEX = "index.html"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # pictures of the conversation are data URLs
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_SAFETY = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_ALWAYS_ASK = "no-cache"  # kept, and used again when the ETag still holds
_FOR_EVER = "public, max-age=31536000, immutable"
_VERSION_CHARS = 16  # of the SHA-256, as web/build.mjs writes them into the page's addresses


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent; `version` is the beginning of its SHA-256."""

    body: bytes
    media_type: str
    version: str

    @property
    def etag(self) -> str:
        """The strong validator of the file's bytes."""
        return f'"{self.version}"'


def read_page() -> dict[str, PageFile]:
    """The page's files by the path each is served at. Raises OSError when they cannot be read."""
    files = {}
    for path in sorted(PAGE_FOLDER.iterdir()):
        media_type = _MEDIA_TYPES.get(path.suffix)
        if media_type is None:
            continue  # build.json is for the test that compares page and sources
        body = path.read_bytes()
        version = hashlib.sha256(body).hexdigest()[:_VERSION_CHARS]
        served_at = "/" if path.name == _INDEX else f"/page/{path.name}"
        files[served_at] = PageFile(body=body, media_type=media_type, version=version)
    return files


_FILES = read_page()  # at import: they are as much a part of the program as its code
PAGE_PATHS = frozenset(_FILES)
"""Where the page and its files are; they need no key, since they hold nothing of anybody."""


def page_routes() -> list[Route]:
    """A GET and HEAD route for each file."""
    return [Route(path, _server_of(file)) for path, file in _FILES.items()]


def _server_of(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        """The file, or 304 for a browser that has it.

        An address that carries the file's version stands for these bytes and may be kept for ever.
        """
        pinned = request.query_params.get("v") == file.version
        headers = {
            **_SAFETY,
            "ETag": file.etag,
            "Cache-Control": _FOR_EVER if pinned else _ALWAYS_ASK,
        }
        if _holds(request.headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    return serve


def _holds(if_none_match: str, etag: str) -> bool:
    """Whether the header names the file's version (RFC 9110 13.1.2, weak comparison)."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
