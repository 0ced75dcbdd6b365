from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.api.ignored import header_of
from civetta.api.wire import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    BadJson,
    decode,
    error_payload,
    parse_json,
)
from civetta.errors import ContextOverflow, EngineBusy, ModelNotFound, RequestInvalid


def test_marks_within_strings_are_no_values_and_the_bound_is_exact():
    marks = '[{,"' * 300_000
    assert parse_json(json.dumps({"a": marks, "b": marks + "\\"}).encode())["a"] == marks
    most = b'{"a":[' + b"[]," * (MAX_CONTAINERS - 3) + b"[]]}"
    assert len(parse_json(most)["a"]) == MAX_CONTAINERS - 2
    with pytest.raises(BadJson, match="arrays and objects"):
        parse_json(most.replace(b"[]]", b"[],[]]"))


class Part(msgspec.Struct, kw_only=True):
    a: int
    b: float | None = None


class Item(msgspec.Struct, kw_only=True):
    role: str
    parts: str | list[Part] | None = None


class Body(msgspec.Struct, kw_only=True):
    items: list[Item]
    free: dict[str, object] | None = None


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b"", "valid JSON"),
        (b"{", "valid JSON"),
        (b'{"a":1,}', "valid JSON"),
        (b"[1]", "JSON object"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"x":[{"a":1,"b":2,"a":1}]}', "twice"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":1e999}', "too large"),
        (b'{"a":' + b"9" * 5000 + b"}", "valid JSON"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"\\udfff":1}', "surrogate"),
        (b'{"a":"\xff"}', "UTF-8"),
        ('{"a":1}'.encode("utf-16"), "UTF-8"),
        (b'{"a":' * 100_000, "nests deeper"),
        (b'{"a":' * 200_000, "arrays and objects"),
        (b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH, None),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nests deeper"),
        (b'{"a":"\\ud83d\\ude00"}', None),
    ],
)
def test_strict_json(body, hint):
    if hint is None:
        assert parse_json(body) == json.loads(body)
        return
    with pytest.raises(BadJson, match=hint) as caught:
        parse_json(body)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 300


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_a_clean_error(body):
    with contextlib.suppress(BadJson):
        assert isinstance(parse_json(body), dict)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["items", "role", "parts", "a", "b", "z"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["items", "free", "z"]), VALUES), st.booleans())
def test_any_object_decodes_or_names_a_field(document, drop):
    with contextlib.suppress(RequestInvalid):
        fields, dropped = decode(document, Body, drop_unknown=drop)
        assert isinstance(fields, Body)
        assert drop or not dropped


@pytest.mark.parametrize(
    ("document", "param", "hint"),
    [
        ({}, "items", "required"),
        ({"items": [{}]}, "items[0].role", "required"),
        ({"items": [{"role": 1}]}, "items[0].role", "expected str, got int"),
        (
            {"items": [{"role": "x", "parts": [{"a": 1, "bb": 2}]}]},
            "items[0].parts[0].bb",
            "mean b",
        ),
        ({"items": [], "itmes": 1}, "itmes", "did you mean items?"),
        ({"items": [], "qqqq": 1}, "qqqq", "remove it"),
    ],
)
def test_faults_name_their_field(document, param, hint):
    with pytest.raises(RequestInvalid, match=hint.replace("?", r"\?")) as caught:
        decode(document, Body, drop_unknown=False)
    assert caught.value.param == param


def test_unknown_fields_can_be_dropped_and_are_reported():
    document = {
        "items": [{"role": "x", "q": 1, "parts": [{"a": 1, "w": 2}]}],
        "z": 3,
        "free": {"y": 1},
    }
    fields, dropped = decode(document, Body, drop_unknown=True)
    assert fields.items[0].parts == [Part(a=1)]
    assert fields.free == {"y": 1}
    assert dropped == ["items[0].q", "items[0].parts[0].w", "z"]
    assert header_of(dropped) == {"X-Civetta-Ignored": "items[0].q, items[0].parts[0].w, z"}


def test_header_of_dropped_fields_is_one_ascii_line():
    header = header_of(["a\nb", "ü"])["X-Civetta-Ignored"]
    assert header.isascii()
    assert "\n" not in header


def test_error_payloads():
    overflow = error_payload(ContextOverflow(9000, 4096, 10))["error"]
    assert overflow["code"] == "context_length_exceeded"
    assert (overflow["n_prompt_tokens"], overflow["n_ctx"]) == (9000, 4096)
    assert "maximum context length is 4096 tokens" in overflow["message"]
    assert error_payload(EngineBusy("x"))["error"]["type"] == "rate_limit_error"
    missing = error_payload(ModelNotFound("x", param="model"))["error"]
    assert (missing["type"], missing["param"]) == ("not_found_error", "model")
