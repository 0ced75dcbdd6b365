from __future__ import annotations

import json
import re

import msgspec
import pytest

from api.serving import app_of, error_of, request, server
from civetta.api import reply_types as replies
from civetta.api.guard import PUBLIC_PATHS
from civetta.api.routes import ENDPOINTS
from civetta.api.web_page import PAGE_PATHS
from civetta.engine.protocol import RequestView
from civetta.types import FinishReason
from fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/completion": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/tokenize": {"content": "Hi", "with_pieces": True},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": MESSAGES},
}


def document(**options):
    return request(app_of(FakeEngine(), **server(**options)), "GET", "/openapi.json").json()


def schema_of(doc, endpoint):
    path = endpoint.paths[0].replace(":path}", "}")
    operation = doc["paths"][path][endpoint.method.lower()]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return doc["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]


def test_every_route_of_the_application_is_in_the_document():
    app = app_of(FakeEngine())
    routed = {
        (method.lower(), re.sub(r":path}", "}", route.path))
        for route in app.routes
        if route.path not in PAGE_PATHS  # files, not operations
        for method in route.methods
        if method != "HEAD"
    }
    told = {(method, path) for path, item in document()["paths"].items() for method in item}
    assert told == routed


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.body], ids=lambda e: e.paths[0])
def test_every_field_is_in_the_document_and_no_other(endpoint):
    schema = schema_of(document(), endpoint)
    assert set(schema["properties"]) == set(endpoint.body.__struct_encode_fields__)
    assert schema["additionalProperties"] is False
    lenient = schema_of(document(unknown_fields="warn"), endpoint)
    assert "additionalProperties" not in lenient


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.body], ids=lambda e: e.paths[0])
def test_every_field_of_the_document_is_read(endpoint):
    """Each is known to the parser: the wrong type is told as the field's, not as an unknown one."""
    app, body = app_of(FakeEngine()), BODIES[endpoint.paths[0]]
    for name in schema_of(document(), endpoint)["properties"]:
        reply = request(app, "POST", endpoint.paths[0], body={**body, name: {"no such": "value"}})
        if reply.status_code != 200:
            assert "Unsupported parameter " + name + ":" not in error_of(reply)["message"]


@pytest.mark.parametrize("path", [e.paths[0] for e in ENDPOINTS if e.body])
def test_ranges_are_those_that_are_refused(path):
    doc = document()
    endpoint = next(e for e in ENDPOINTS if path in e.paths)
    fields = schema_of(doc, endpoint)["properties"]
    if "temperature" not in fields:
        return
    for name in ("temperature", "top_p", "top_k", "seed", "min_keep", "presence_penalty"):
        limits = next(o for o in fields[name]["anyOf"] if o["type"] != "null")
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound not in limits:
                continue
            inside = request(
                app_of(FakeEngine("a")), "POST", path, body={**BODIES[path], name: limits[bound]}
            )
            assert inside.status_code == 200, (name, bound)
            beyond = {**BODIES[path], name: limits[bound] + step}
            outside = request(app_of(FakeEngine("a")), "POST", path, body=beyond)
            assert outside.status_code == (200 if path == "/apply-template" else 400), (name, bound)


def test_replies_are_what_the_document_says():
    engine = FakeEngine("hello", cached_tokens=1)
    engine.active = (
        RequestView(
            request_id="r1",
            state="prefilling",
            prompt_tokens=9,
            cached_tokens=1,
            processed_tokens=4,
            generated_tokens=0,
            max_tokens=None,
        ),
    )
    app = app_of(engine)
    for endpoint in ENDPOINTS:
        if endpoint.method == "DELETE" or isinstance(endpoint.reply, str):
            continue
        if "{response_id}" in endpoint.paths[0]:  # in test_responses_store.py
            continue
        path = endpoint.paths[0].replace("{model_id:path}", "fake-model")
        response = request(app, endpoint.method, path, body=BODIES.get(path))
        assert response.status_code == 200, path
        _holds(response.json(), endpoint.reply)


def test_errors_are_what_the_document_says():
    app = app_of(FakeEngine(context_tokens=4), **server(api_key=("k",)))
    key = {"authorization": "Bearer k"}
    for reply in (
        request(app, "GET", "/nowhere", headers=key),
        request(app, "GET", "/v1/models"),
        request(app, "POST", "/v1/completions", body=b"{", headers=key),
        request(app, "POST", "/v1/completions", body={"prompt": "too long"}, headers=key),
    ):
        assert reply.status_code >= 400
        _holds(reply.json(), replies.Error)


def test_finish_reasons_of_the_document_are_those_there_are():
    doc = document()["components"]["schemas"]
    told = set(doc["ChatChoice"]["properties"]["finish_reason"]["enum"])
    assert told == {r.value for r in FinishReason} - {"cancelled", "error"}


def test_a_key_is_asked_for_where_it_is_needed():
    assert "security" not in document()
    app = app_of(FakeEngine(), **server(api_key=("k",)))
    doc = request(app, "GET", "/openapi.json", headers={"x-api-key": "k"}).json()
    assert doc["security"] == [{"bearer": []}, {"header": []}]
    open_paths = {
        path for path, item in doc["paths"].items() if all("security" in op for op in item.values())
    }
    assert open_paths == {path for path in doc["paths"] if path in PUBLIC_PATHS}


def _holds(payload, kind):
    """`payload` is of type `kind`, and has no field that the type does not name."""
    made = msgspec.convert(payload, kind)
    back = json.loads(msgspec.json.encode(made))
    assert back == payload
