"""GET /openapi.json: the API as an OpenAPI 3.1 document, made from the tables that serve it.

Operations come from `routes.ENDPOINTS`, request fields from the very structs that parse bodies,
ranges of sampling fields from the settings; tests hold replies against the reply types.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

import civetta
from civetta.api.fields import field_range
from civetta.api.guard import PUBLIC_PATHS
from civetta.api.wire import json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from civetta.api.routes import Endpoint

_REF = "#/components/schemas/{name}"
_STREAM = "text/event-stream"
_EVENT = {
    "type": "object",
    "description": "One server-sent event; its data is JSON, but for a closing [DONE].",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_TEXTS = {
    "400": "A field or its value is wrong; `param` names it",
    "401": "The API key is missing or wrong",
    "403": "The page's origin is not on the list of --cors-origin",
    "404": "Nothing of that name is here",
    "405": "Another method",
    "408": "The body did not arrive",
    "413": "The body is too large",
    "429": "The queue is full",
    "431": "The headers are too large",
    "499": "The request was ended by its id",
    "500": "The request failed",
    "503": "Not ready, closing, or too many requests are open",
    "504": "The server's time limit ran out",
}


async def document(request: Request) -> Response:
    """The document of this server, with its keys and its mode for unknown fields."""
    options = request.app.state.settings.server
    return json_response(
        openapi(
            request.app.state.endpoints,
            needs_key=bool(options.api_key or options.api_key_file),
            unknown_refused=not options.drop_unknown,
        )
    )


@lru_cache(maxsize=4)
def openapi(
    endpoints: tuple[Endpoint, ...], *, needs_key: bool, unknown_refused: bool
) -> dict[str, Any]:
    """The whole document, ready for JSON."""
    bodies = _structs({endpoint.body for endpoint in endpoints if endpoint.body is not None})
    errors = {endpoint.error: None for endpoint in endpoints}
    types = [*errors, *(e.reply for e in endpoints if not isinstance(e.reply, str)), *bodies]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    refs = dict(zip(map(repr, types), schemas, strict=True))
    for struct in bodies:
        _complete(components[struct.__name__], closed=unknown_refused)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        for path in endpoint.paths:
            operation = _operation(endpoint, path, refs)
            if needs_key and path in PUBLIC_PATHS:
                operation["security"] = []
            spelled = path.replace(":path}", "}")
            paths.setdefault(spelled, {})[endpoint.method.lower()] = operation
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "civetta",
            "version": civetta.__version__,
            "description": "An inference server; docs/http.md tells more.",
        },
        "paths": paths,
        "components": {"schemas": dict(components)},
    }
    if needs_key:
        whole["components"]["securitySchemes"] = _SCHEMES
        whole["security"] = [{name: []} for name in _SCHEMES]
    return whole


def summary_of(endpoint: Endpoint) -> str:
    """What it does in a sentence: the beginning of its handler's docstring."""
    text = (inspect.getdoc(endpoint.handler) or "").split("\n\n")[0].replace("\n", " ")
    if text.startswith(f"{endpoint.method} /"):
        text = text.partition(": ")[2]
    text = text.split(" Raises ")[0]
    return text[:1].upper() + text[1:]


def _operation(endpoint: Endpoint, path: str, refs: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint, path),
        "summary": summary_of(endpoint),
        "parameters": _parameters(endpoint, path),
        "responses": _responses(endpoint, refs),
    }
    if endpoint.body is not None:
        schema = refs[repr(endpoint.body)]
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _operation_id(endpoint: Endpoint, path: str) -> str:
    words = "".join(mark if mark.isalnum() else " " for mark in path).split()
    return "_".join([endpoint.method.lower(), *words])


def _parameters(endpoint: Endpoint, path: str) -> list[dict[str, Any]]:
    names = [part[1:-1].removesuffix(":path") for part in path.split("/") if part.startswith("{")]
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ] + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in endpoint.query]


def _responses(endpoint: Endpoint, refs: dict[str, Any]) -> dict[str, Any]:
    if isinstance(endpoint.reply, str):
        content: dict[str, Any] = {endpoint.reply: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": refs[repr(endpoint.reply)]}}
    if endpoint.streams:
        content[_STREAM] = {"schema": _EVENT}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    usual = (400, 401, 403, 431) if endpoint.body is not None else (401, 403, 431)
    for status in sorted({*usual, 405, 503, *endpoint.statuses}):
        schema = refs[repr(endpoint.error)]
        if status == 503 and all(path in PUBLIC_PATHS for path in endpoint.paths):
            schema = refs[repr(endpoint.reply)]
        responses[str(status)] = {
            "description": _TEXTS[str(status)],
            "content": {"application/json": {"schema": schema}},
        }
    return responses


def _structs(roots: set[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """The structs of request bodies and all that are nested in them, by name."""
    found: dict[str, type[msgspec.Struct]] = {}

    def visit(info: Any) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls.__name__ not in found:
                found[info.cls.__name__] = info.cls
                for field in info.fields:
                    visit(field.type)
        elif isinstance(info, msgspec.inspect.UnionType):
            for option in info.types:
                visit(option)
        elif isinstance(info, msgspec.inspect.ListType):
            visit(info.item_type)

    for root in sorted(roots, key=lambda struct: struct.__name__):
        visit(msgspec.inspect.type_info(root))
    return list(found.values())


def _complete(schema: dict[str, Any], *, closed: bool) -> None:
    """What the type does not say: unknown fields are refused, sampling values have ranges."""
    if closed:
        schema["additionalProperties"] = False
    for name, field in schema.get("properties", {}).items():
        limits = field_range(name)
        if limits is None:
            continue
        for option in field.get("anyOf", [field]):
            if option.get("type") in ("number", "integer"):
                option.update(limits)
