"""The page at `/`: how it is served, that it is closed to the outside, that it is what web/ builds."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path

import pytest

from api.serving import app_of, error_of, request, server
from civetta.api.web_page import PAGE_FOLDER, PAGE_PATHS, read_page
from fake_engine import FakeEngine

WEB = Path(__file__).parents[2] / "web"
TYPES = {
    "/": "text/html; charset=utf-8",
    "/page/app.js": "text/javascript; charset=utf-8",
    "/page/style.css": "text/css; charset=utf-8",
    "/page/icon.svg": "image/svg+xml",
    "/page/licences.txt": "text/plain; charset=utf-8",
}
LARGEST_BYTES = 300_000
# Names of XML vocabularies, which nothing fetches, and the addresses that a link may begin with.
NAMES = re.compile(r"http://www\.w3\.org/(?:1998/Math/MathML|1999/x(?:html|link)|2000/svg)")


def get(path: str, **headers: str):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return request(app_of(FakeEngine()), "GET", path, headers=named)


def linked_paths() -> list[str]:
    return re.findall(r'(?:href|src)="([^"]*)"', get("/").text)


def record() -> dict[str, dict[str, str]]:
    return json.loads((PAGE_FOLDER / "build.json").read_bytes())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_file_is_served_with_its_type():
    assert set(TYPES) == PAGE_PATHS
    for path, media_type in TYPES.items():
        response = get(path)
        assert response.status_code == 200, path
        assert response.headers["content-type"] == media_type
        name = path.removeprefix("/page/").lstrip("/") or "index.html"
        assert response.content == (PAGE_FOLDER / name).read_bytes()


def test_the_record_of_the_build_is_not_served():
    assert get("/page/build.json").status_code == 404
    assert get("/page/").status_code == 404
    assert get("/page/..%2fapp.py").status_code == 404


@pytest.mark.parametrize("path", sorted(TYPES))
def test_the_page_needs_no_key_and_answers_before_the_model_is_there(path):
    app = app_of(None, **server(api_key=("sesame",), max_connections=1))
    assert request(app, "GET", path).status_code == 200
    head = request(app, "HEAD", path)
    assert (head.status_code, head.content) == (200, b"")
    assert request(app, "GET", "/v1/models").status_code == 401


def test_other_methods_of_the_page_are_refused():
    response = request(app_of(FakeEngine()), "POST", "/", body={})
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"


def test_a_browser_that_has_the_file_gets_304():
    etag = get("/").headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{16}"', etag)
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        response = get("/", if_none_match=known)
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == etag
    assert get("/", if_none_match='"other"').status_code == 200


def test_only_addresses_with_the_right_version_are_kept_for_ever():
    linked = linked_paths()
    assert {path.partition("?")[0] for path in linked} == {
        "page/app.js",
        "page/style.css",
        "page/icon.svg",
    }
    for path in linked:
        assert "immutable" in get(f"/{path}").headers["cache-control"]
        bare, _, version = path.partition("?v=")
        assert get(f"/{bare}").headers["cache-control"] == "no-cache"
        wrong = version[::-1]
        assert get(f"/{bare}?v={wrong}").headers["cache-control"] == "no-cache"
    assert get("/").headers["cache-control"] == "no-cache"


def test_the_policy_lets_nothing_from_outside_in_and_nothing_out():
    for path in TYPES:
        headers = get(path).headers
        policy = dict(
            part.strip().partition(" ")[::2]
            for part in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        for kind in ("script-src", "style-src", "connect-src"):
            assert policy[kind] == "'self'"
        assert policy["img-src"] == "'self' data:"
        for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types"):
            assert policy[kind] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"


def test_no_file_names_another_place():
    for path, file in read_page().items():
        if path == "/page/licences.txt":
            continue
        text = NAMES.sub("", file.body.decode())
        assert not re.findall(r"(?i)(?:https?:|wss?:)?//[a-z0-9-]+\.[a-z0-9.-]+", text), path
        assert not re.search(r"(?i)@import|sourcemappingurl|\beval\(|new Function", text), path


def test_the_page_holds_no_inline_script_or_style():
    html = get("/").text
    assert re.findall(r"<script[^>]*>", html) == re.findall(r'<script[^>]*\ssrc="[^>]*>', html)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", html)


def test_the_page_is_small():
    assert sum(len(file.body) for file in read_page().values()) < LARGEST_BYTES


def test_the_shipped_files_are_those_that_were_built():
    shipped = {path.name: digest(path) for path in PAGE_FOLDER.iterdir()}
    del shipped["build.json"]
    assert record()["files"] == shipped, "edited by hand? run `npm run build` in web/"


def test_the_build_is_of_these_sources():
    tools = ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")
    files = [path for path in (WEB / "src").rglob("*") if path.is_file()]
    found = {
        path.relative_to(WEB).as_posix(): digest(path)
        for path in (*files, *(WEB / name for name in tools))
    }
    assert record()["sources"] == found, "run `npm run build` in web/ and commit what it writes"


def test_what_a_browser_fetches_again_and_again_fills_no_log(caplog):
    app = app_of(FakeEngine())
    with caplog.at_level(logging.INFO, logger="civetta.api"):
        for path in ("/", "/page/app.js", "/metrics"):
            request(app, "GET", path)
        assert not caplog.records
        request(app, "GET", "/v1/models")
    assert len(caplog.records) == 1
