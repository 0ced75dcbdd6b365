"""The app in this process: through httpx2's ASGI transport, and by hand for disconnects."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anthropic
import httpx2
import openai

from civetta.api.app import build_app
from civetta.engine import load
from civetta.options import ServerOptions, Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import ModuleType

    import pytest

    from civetta.api.delivery import Pace
    from civetta.engine.speculation import Drafting
    from civetta.model.trunk import Trunk
    from civetta.options import DraftingOptions
    from fake_engine import FakeEngine


def app_of(fake: FakeEngine | None, pace: Pace | None = None, **topics: Any) -> Any:
    return build_app(fake, Settings(**topics), pace=pace)


def drafting_always(patch: pytest.MonkeyPatch, where: ModuleType = load) -> None:
    """What `where` loads from now on drafts in every round: what is worth it is a matter of time."""
    drafting_of = where.drafting_of

    def always(options: DraftingOptions, trunk: Trunk) -> Drafting | None:
        found = drafting_of(options, trunk)
        return None if found is None else replace(found, fixed=True)

    patch.setattr(where, "drafting_of", always)


def server(**values: Any) -> dict[str, Any]:
    return {"server": ServerOptions(**values)}


@asynccontextmanager
async def http(app: Any) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@asynccontextmanager
async def sdk(app: Any, api_key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with http(app) as client:
        yield openai.AsyncOpenAI(
            api_key=api_key, base_url="http://test/v1", http_client=client, max_retries=0
        )


@asynccontextmanager
async def anthropic_sdk(app: Any, api_key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with http(app) as client:
        yield anthropic.AsyncAnthropic(
            api_key=api_key, base_url="http://test", http_client=client, max_retries=0
        )


def request(
    app: Any, method: str, path: str, *, body: Any = None, headers: dict[str, str] | None = None
) -> httpx2.Response:
    """One request; `body` is encoded as JSON unless it is bytes."""

    async def call() -> httpx2.Response:
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        async with http(app) as client:
            return await client.request(method, path, content=content, headers=headers or {})

    return asyncio.run(call())


def error_of(response: httpx2.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def events_of(text: str) -> list[Any]:
    """Payloads of a stream that has to end with [DONE]."""
    lines = [
        line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")
    ]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class RawClient:
    """An ASGI connection that can be cut at any moment; `sent` holds what the app answered."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }
        self._body = json.dumps(body).encode()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.changed = asyncio.Event()

    async def run(self) -> None:
        await self._incoming.put({"type": "http.request", "body": self._body, "more_body": False})
        await self._app(self._scope, self._incoming.get, self._send)

    async def disconnect(self) -> None:
        await self._incoming.put({"type": "http.disconnect"})

    async def until(self, condition: Any, timeout_s: float = 10) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()

    @property
    def text(self) -> str:
        return b"".join(item.get("body", b"") for item in self.sent).decode()

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.changed.set()
