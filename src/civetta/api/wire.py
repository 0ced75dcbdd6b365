"""Bytes on the wire: strict JSON in, JSON and server-sent events out, errors as bodies.

Every dialect's request goes `read_body` -> `parse_json` -> `decode`; unknown fields are named by
their path (`messages[2].foo`) and either refused or, in warn mode, dropped and reported.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import msgspec
from msgspec import inspect
from starlette.responses import Response

from civetta.chat.json_text import parsed_float, parsed_int, without_spelling
from civetta.config import nearest
from civetta.errors import (
    BodyTimeout,
    BodyTooLarge,
    CivettaError,
    ContextOverflow,
    RequestError,
    RequestInvalid,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from starlette.requests import Request

    from civetta.options import ServerOptions

T = TypeVar("T")
MAX_DEPTH = 128
MAX_CONTAINERS = 1 << 17
MAX_VALUES = 1 << 19
"""Arrays and objects of one body, and commas: more than a context's worth of messages or token ids.
Parsing holds the interpreter, so that what it may meet is bounded before."""
SHOWN_CHARS = 200
SMALL_BODY_BYTES = 65_536
BODY_TIMEOUT_S = 120
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
# A string that does not end reaches to the end of the body: one pass, whatever the bytes.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class BadJson(RequestInvalid):
    """The body is not JSON, or JSON that parsers disagree about."""

    code = "invalid_json"


async def read_request(
    request: Request, kind: type[T], *, spelled: str = ""
) -> tuple[T, list[str]]:
    """Read a request's body into the struct `kind`; also the unknown fields that were dropped.

    Numbers of the member `spelled` keep their spelling, for `json_text`.
    Raises BodyTooLarge, BodyTimeout, BadJson or RequestInvalid.
    """
    options: ServerOptions = request.app.state.settings.server
    body = await read_body(request, options.max_request_bytes)

    def read() -> tuple[T, list[str]]:
        return decode(parse_json(body, spelled=spelled), kind, drop_unknown=options.drop_unknown)

    if len(body) <= SMALL_BODY_BYTES:
        return read()
    # On a thread, so that no stream waits; one at a time, for a tree takes many times its text.
    async with request.app.state.parsing:
        return await asyncio.to_thread(read)


async def read_body(request: Request, limit: int) -> bytes:
    """Read the whole request body.

    Raises BodyTooLarge as soon as it passes `limit` bytes, BodyTimeout when it does not end within
    BODY_TIMEOUT_S, and ClientDisconnect when the client leaves before it ends.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise body_too_large(limit)
    except TimeoutError as error:
        raise BodyTimeout(
            f"The request body did not arrive within {BODY_TIMEOUT_S} s: send it again."
        ) from error
    return bytes(body)


def body_too_large(limit: int) -> BodyTooLarge:
    """The error for a body of more than `limit` bytes."""
    return BodyTooLarge(
        f"The request body is larger than {limit} bytes: send less, or start the server with a"
        " larger --max-request-bytes."
    )


def parse_json(body: bytes, *, spelled: str = "") -> dict[str, Any]:
    """Parse a JSON object in which every parser would read the same.

    Numbers of the member `spelled` are written by `json_text` as they were read. Raises BadJson for
    broken JSON or UTF-8, duplicate keys, numbers without a finite value, lone surrogates, nesting
    deeper than MAX_DEPTH, more than MAX_CONTAINERS or MAX_VALUES values, or a body that is no object.
    """
    _check_size(body)
    try:
        document = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_finite_spelled if spelled else _finite,
            parse_int=parsed_int if spelled and b"-0" in body else None,
        )
    except UnicodeDecodeError as error:
        raise BadJson(f"The request body is not UTF-8: {error.reason}.") from error
    except RecursionError as error:
        raise BadJson(f"The request body nests deeper than {MAX_DEPTH} levels.") from error
    except ValueError as error:
        raise BadJson(f"The request body is not valid JSON: {error}.") from error
    if not isinstance(document, dict):
        raise BadJson("The request body has to be a JSON object.")
    _check_tree(document)
    if spelled:
        return {k: v if k == spelled else without_spelling(v) for k, v in document.items()}
    return document


def decode(
    document: dict[str, Any], kind: type[T], *, drop_unknown: bool, path: str = ""
) -> tuple[T, list[str]]:
    """Turn a parsed object into the struct `kind`; also the unknown fields that were dropped.

    `path` says where in the body the object is; it begins the names of fields. Raises
    RequestInvalid naming the field for an unknown field (unless `drop_unknown`), a wrong type, or
    a missing field.
    """
    dropped: list[str] = []
    info = _type_info(cast("Hashable", kind))
    for holder, key, place, known in list(_unknown_fields(document, info, path)):
        if not drop_unknown:
            near = nearest(key, known) if len(key) < SHOWN_CHARS else None
            cure = f"did you mean {near}?" if near else "remove it."
            shown = place if len(place) <= SHOWN_CHARS else place[:SHOWN_CHARS] + "..."
            raise RequestInvalid(
                f"Unsupported parameter {shown}: {cure}", param=shown, code="unsupported_parameter"
            )
        del holder[key]
        dropped.append(place)
    try:
        return msgspec.convert(document, kind), dropped
    except msgspec.ValidationError as error:
        _raise_invalid(str(error), path)


def event(payload: object) -> bytes:
    """Frame one JSON-encodable payload as a server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def typed_event(payload: dict[str, Any]) -> bytes:
    """The same, with the payload's `type` as the name of the event."""
    name: str = payload["type"]
    return b"event: " + name.encode() + b"\n" + event(payload)


def json_response(
    payload: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON response; structs are encoded by msgspec."""
    return Response(
        msgspec.json.encode(payload), status, headers=headers, media_type="application/json"
    )


def error_payload(error: CivettaError) -> dict[str, object]:
    """The `{"error": {...}}` body of the OpenAI dialect."""
    kind = _TYPES.get(error.http_status)
    if kind is None:
        kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    fields: dict[str, object] = {
        "message": error.message,
        "type": kind,
        "param": error.param if isinstance(error, RequestError) else None,
        "code": error.code,
    }
    if isinstance(error, ContextOverflow):
        fields["n_prompt_tokens"] = error.prompt_tokens
        fields["n_ctx"] = error.context_tokens
    return {"error": fields}


def error_response(error: CivettaError, payload: object = None) -> Response:
    """The error as a response with its status; `payload` is its body in another dialect."""
    headers = {}
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.http_status == 429:
        headers["Retry-After"] = "1"
    return json_response(payload or error_payload(error), error.http_status, headers)


@functools.cache
def _type_info(kind: Hashable) -> inspect.Type:
    """What a struct takes; working it out takes milliseconds, and the structs are few."""
    return inspect.type_info(kind)


def _check_size(body: bytes) -> None:
    if not _too_many(body):
        return
    if _too_many(_STRINGS.sub(b"", body)):
        raise BadJson(
            f"The request body has more than {MAX_CONTAINERS} arrays and objects, or more than"
            f" {MAX_VALUES} values."
        )


def _too_many(text: bytes) -> bool:
    containers = text.count(b"[") + text.count(b"{")
    return containers > MAX_CONTAINERS or text.count(b",") > MAX_VALUES


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadJson(f"The request body has the key {key[:80]!r} twice in one object.")
            seen.add(key)
    return made


def _constant(text: str) -> NoReturn:
    raise BadJson(f"The request body has {text}, which is not a JSON number.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadJson(f"The request body has the number {text[:40]}, which is too large.")
    return value


def _finite_spelled(text: str) -> float:
    return parsed_float(text) if math.isfinite(float(text)) else _finite(text)


def _check_tree(document: dict[str, Any]) -> None:
    level: list[Any] = [document]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise BadJson(f"The request body nests deeper than {MAX_DEPTH} levels.")
        below: list[Any] = []
        for holder in level:
            if isinstance(holder, dict):
                for key in holder:
                    _check_text(key)
            for value in holder.values() if isinstance(holder, dict) else holder:
                if isinstance(value, str):
                    _check_text(value)
                elif isinstance(value, (dict, list)):
                    below.append(value)
        level = below


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadJson(
            "The request body has half of a surrogate pair (\\ud800 to \\udfff), which is not text."
        ) from error


def _unknown_fields(
    value: Any, info: inspect.Type, path: str
) -> Iterator[tuple[dict[str, Any], str, str, list[str]]]:
    """Yield (object, key, dotted path, known keys) for every key that no struct field takes."""
    if isinstance(info, inspect.UnionType):
        wanted = inspect.StructType if isinstance(value, dict) else inspect.ListType
        for option in info.types:
            if isinstance(option, wanted):
                yield from _unknown_fields(value, option, path)
                return
    elif isinstance(info, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_fields(item, info.item_type, f"{path}[{index}]")
    elif isinstance(info, inspect.StructType) and isinstance(value, dict):
        known = {item.encode_name: item.type for item in info.fields}
        for key, item in value.items():
            below = f"{path}.{key}" if path else key
            if key in known:
                yield from _unknown_fields(item, known[key], below)
            else:
                yield value, key, below, list(known)


def _raise_invalid(message: str, path: str) -> NoReturn:
    place = _PATH.search(message)
    param = ".".join(part for part in (path, place.group(1) if place else "") if part) or None
    text = message[: place.start()] if place else message
    text = text.replace("`", "")
    missing = re.fullmatch(r"Object missing required field (\S+)", text)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        raise RequestInvalid(f"The field {param} is required.", param=param)
    text = text[0].lower() + text[1:]
    raise RequestInvalid(f"The field {param or 'body'} is wrong: {text}.", param=param)
