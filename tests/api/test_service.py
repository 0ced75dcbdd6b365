from __future__ import annotations

import asyncio

import pytest

from api.serving import app_of, error_of, request, sdk, server
from fake_engine import FakeEngine


def test_case_70_sdk_lists_the_model_with_its_window():
    async def run():
        async with sdk(app_of(FakeEngine(context_tokens=777))) as client:
            listed = [item async for item in client.models.list()]
            return listed, await client.models.retrieve("fake-model")

    listed, one = asyncio.run(run())
    assert listed == [one]
    assert one.id == "fake-model"
    extra = one.model_dump()
    assert extra["context_length"] == extra["max_model_len"] == extra["meta"]["n_ctx"] == 777
    assert extra["architecture"]["input_modalities"] == extra["modalities"] == ["text"]


def test_served_model_name_replaces_the_id():
    app = app_of(FakeEngine(), **server(served_model_name="org/my-model"))
    assert request(app, "GET", "/v1/models").json()["data"][0]["id"] == "org/my-model"
    assert request(app, "GET", "/v1/models/org/my-model").status_code == 200
    assert request(app, "GET", "/ready").json() == {"status": "ready", "model": "org/my-model"}
    body = {"prompt": "x", "model": "fake-model"}
    refused = request(app, "POST", "/v1/completions", body=body)
    assert refused.status_code == 404
    assert error_of(refused)["code"] == "model_not_found"
    assert "org/my-model" in error_of(refused)["message"]


@pytest.mark.parametrize(
    "path", ["/health", "/v1/health", "/healthz", "/ready", "/readyz", "/v1/ready"]
)
def test_case_68_health_while_loading_and_after_without_a_key(path):
    app = app_of(None, **server(api_key=("sesame",)))
    loading = request(app, "GET", path)
    assert (loading.status_code, loading.json()["status"]) == (503, "loading model")
    assert loading.headers["retry-after"] == "1"
    app.state.engine = FakeEngine()
    assert request(app, "GET", path).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/completions")])
def test_the_api_while_loading(method, path):
    response = request(app_of(None), method, path, body={"prompt": "x"})
    assert response.status_code == 503
    assert error_of(response)["code"] == "not_ready"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/page", 404),
    ],
)
def test_wrong_paths_and_methods_are_json_errors(method, path, status):
    response = request(app_of(FakeEngine()), method, path)
    assert response.status_code == status
    error_of(response)
