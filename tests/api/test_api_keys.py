"""Who may enter: API keys from flags and file, and web pages by origin."""

from __future__ import annotations

import hmac

import pytest

from api.serving import app_of, error_of, request, server
from civetta.api.keys import read_keys
from civetta.api.routes import ENDPOINTS
from civetta.errors import UsageError
from civetta.options import ServerOptions
from fake_engine import FakeEngine

PUBLIC = {"/health", "/healthz", "/v1/health", "/ready", "/readyz", "/v1/ready"}
PATHS = [(e.method, path) for e in ENDPOINTS for path in e.paths]


def keyed(*keys):
    return app_of(FakeEngine(), **server(api_key=keys))


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_nothing_but_health_without_a_key(method, path):
    response = request(keyed("sesame"), method, path.replace("{model_id:path}", "x"))
    if path in PUBLIC:
        assert response.status_code == 200
    else:
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"


def test_each_of_several_keys_opens_and_no_mixture():
    app = keyed("first", "second")
    for key, status in (("first", 200), ("second", 200), ("firs", 401), ("first second", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert request(app, "GET", "/v1/models", headers=headers).status_code == status


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch):
    compared = []
    real = hmac.compare_digest

    def compare(a, b):
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr("civetta.api.keys.hmac.compare_digest", compare)
    for given in ("first", "third", "wrong", "", "x" * 5000):
        compared.clear()
        request(
            keyed("first", "second", "third"), "GET", "/v1/models", headers={"x-api-key": given}
        )
        assert compared == [(32, 32)] * 3, "digests of equal length, whatever came"


def test_a_file_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# mine\nalpha\n\n  beta  \n")
    options = ServerOptions(api_key=("gamma",), api_key_file=str(file))
    assert read_keys(options) == ("gamma", "alpha", "beta")
    app = app_of(FakeEngine(), server=options)
    assert request(app, "GET", "/v1/models").status_code == 401
    assert request(app, "GET", "/v1/models", headers={"x-api-key": "beta"}).status_code == 200


@pytest.mark.parametrize("text", ["", "# nothing\n", "two words\n", "schlüssel\n", "\x00\n"])
def test_a_bad_file_of_keys_is_told_at_the_start_without_its_text(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        app_of(FakeEngine(), **server(api_key_file=str(file)))
    assert "words" not in caught.value.message
    assert "schl" not in caught.value.message


def test_a_missing_file_of_keys_is_told_at_the_start(tmp_path):
    with pytest.raises(UsageError, match="--api-key-file"):
        app_of(FakeEngine(), **server(api_key_file=str(tmp_path / "none")))


def preflight(app, origin, **headers):
    asked = {"origin": origin, "access-control-request-method": "POST", **headers}
    return request(app, "OPTIONS", "/v1/chat/completions", headers=asked)


def test_a_listed_origin_may_use_the_api_and_its_preflight_needs_no_key():
    app = app_of(
        FakeEngine(), **server(cors_origin=("https://a.example", "http://b:1"), api_key=("k",))
    )
    asks = {"access-control-request-headers": "authorization, x-stainless-os"}
    answer = preflight(app, "https://a.example", **asks)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "POST" in answer.headers["access-control-allow-methods"]
    reply = request(app, "GET", "/v1/models", headers={"origin": "http://b:1", "x-api-key": "k"})
    assert reply.headers["access-control-allow-origin"] == "http://b:1"
    assert "X-Request-ID" in reply.headers["access-control-expose-headers"]
    assert reply.headers["vary"] == "Origin"


@pytest.mark.parametrize("origins", [(), ("https://a.example",)])
@pytest.mark.parametrize("origin", ["https://evil.example", "https://a.example.evil", "null"])
def test_another_origin_may_not(origins, origin):
    app = app_of(FakeEngine(), **server(cors_origin=origins))
    answer = preflight(app, origin)
    assert answer.status_code == 403
    assert error_of(answer)["code"] == "origin_refused"
    reply = request(app, "GET", "/v1/models", headers={"origin": origin})
    assert "access-control-allow-origin" not in reply.headers


def test_a_star_opens_to_every_page_also_for_errors_and_streams():
    app = app_of(FakeEngine(), **server(cors_origin=("*",)))
    assert preflight(app, "https://any.example").headers["access-control-allow-origin"] == "*"
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {"promt": "x"}):
        reply = request(
            app, "POST", "/v1/completions", body=body, headers={"origin": "https://any.example"}
        )
        assert reply.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("named", ["x\r\nset-cookie: a", "a" * 3000, "<script>"])
def test_odd_header_names_are_not_sent_back(named):
    app = app_of(FakeEngine(), **server(cors_origin=("*",)))
    raw = {"access-control-request-headers": named.encode()}
    answer = preflight(app, "https://a.example", **raw)
    assert answer.headers["access-control-allow-headers"].startswith("Authorization")


def test_options_without_an_origin_is_no_preflight():
    assert request(keyed("k"), "OPTIONS", "/v1/models").status_code == 401
    assert request(app_of(FakeEngine()), "OPTIONS", "/v1/models").status_code == 405
