from __future__ import annotations

import asyncio
import logging

import pytest

from api.serving import RawClient, app_of, error_of, request, server
from fake_engine import FakeEngine

HEALTH = ("/health", "/healthz", "/v1/health", "/ready", "/readyz", "/v1/ready")


def test_every_response_has_its_own_request_id():
    app = app_of(FakeEngine())
    ids = [
        request(app, "GET", path).headers["x-request-id"]
        for path in ("/health", "/v1/models", "/nowhere", "/v1/models/other")
    ]
    assert ids == ["r1", "r2", "r3", "r4"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic sesame"},
        {"authorization": "sesame"},
        {"authorization": "Bearer "},
        {"x-api-key": "sesam"},
        {"authorization": "Bearer sesäme".encode("latin-1").decode("latin-1")},
    ],
)
def test_wrong_keys_are_refused(headers):
    app = app_of(FakeEngine(), **server(api_key=("sesame",)))
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    for path in ("/v1/models", "/metrics", "/nowhere"):
        response = request(app, "GET", path, headers=raw)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "sesame" not in response.text


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sesame"},
        {"authorization": "bearer  sesame"},
        {"x-api-key": "sesame"},
    ],
)
def test_the_right_key_opens(headers):
    app = app_of(FakeEngine(), **server(api_key=("sesame",)))
    assert request(app, "GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", HEALTH)
def test_health_needs_no_key(path):
    assert request(app_of(FakeEngine(), **server(api_key=("k",))), "GET", path).status_code == 200


def test_a_body_over_the_limit_is_refused_with_its_limit():
    app = app_of(FakeEngine(), **server(max_request_bytes=100))
    big = b'{"prompt":"' + b"x" * 200 + b'"}'
    response = request(app, "POST", "/v1/completions", body=big)
    assert response.status_code == 413
    assert "100 bytes" in error_of(response)["message"]
    small = b'{"prompt":"' + b"x" * 20 + b'"}'
    assert request(app, "POST", "/v1/completions", body=small).status_code == 200


def test_a_chunked_body_over_the_limit_is_refused_too():
    app = app_of(FakeEngine(), **server(max_request_bytes=100))

    async def run():
        client = RawClient(app, "/v1/completions", {"prompt": "x" * 300})
        await client.run()
        return client

    assert asyncio.run(run()).sent[0]["status"] == 413


def test_more_open_requests_than_allowed_get_503():
    import threading

    gate = threading.Event()
    engine = FakeEngine(before_start=gate.wait)
    app = app_of(engine, **server(max_connections=1))

    async def run():
        held = RawClient(app, "/v1/completions", {"prompt": "x"})
        task = asyncio.create_task(held.run())
        while not engine.requests:
            await asyncio.sleep(0.001)
        refused = RawClient(app, "/v1/completions", {"prompt": "x"})
        await refused.run()
        gate.set()
        await task
        again = RawClient(app, "/v1/completions", {"prompt": "x"})
        await again.run()
        return held, refused, again

    held, refused, again = asyncio.run(run())
    assert held.sent[0]["status"] == 200
    assert refused.sent[0]["status"] == 503
    assert "--max-connections" in refused.text
    assert again.sent[0]["status"] == 200


def test_a_fault_of_ours_is_a_500_without_details(caplog):
    def explode(_):
        raise ZeroDivisionError("secret detail")

    engine = FakeEngine()
    engine.submit = explode
    response = request(app_of(engine), "POST", "/v1/completions", body={"prompt": "x"})
    assert response.status_code == 500
    error = error_of(response)
    assert error["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in error["message"]
    assert "secret detail" in caplog.text


def test_requests_are_logged_without_their_text(caplog):
    with caplog.at_level(logging.DEBUG, logger="civetta"):
        request(
            app_of(FakeEngine("REPLYTEXT"), **server(api_key=("sesame",))),
            "POST",
            "/v1/completions",
            body={"prompt": "PROMPTTEXT"},
            headers={"authorization": "Bearer sesame"},
        )
    assert "id=r1 method=POST path=/v1/completions status=200" in caplog.text
    for secret in ("PROMPTTEXT", "REPLYTEXT", "sesame"):
        assert secret not in caplog.text
