"""Plain completions bound to a format, and llama.cpp's spellings of grammar, schema and biases."""

from __future__ import annotations

import json

import pytest

from api.serving import app_of, error_of, request
from civetta.types import Constraint, Grammar
from fake_engine import FakeEngine

DIGITS = 'root ::= digit+ ("," digit)*\ndigit ::= [0-9]\n'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def post(engine, path, **body):
    return request(app_of(engine), "POST", path, body={"prompt": "Hi", **body})


def bound(path, **body):
    engine = FakeEngine("1")
    response = post(engine, path, **body)
    assert response.status_code == 200, response.text
    return engine.requests[0].constraint


def biases(value):
    engine = FakeEngine("1")
    assert post(engine, "/completion", logit_bias=value).status_code == 200
    return dict(engine.requests[0].sampling.logit_bias)


def test_a_grammar_of_llama_cpp_binds_from_the_first_token():
    found = bound("/completion", grammar=DIGITS)
    assert found == Constraint(grammar=Grammar(kind="gbnf", text=DIGITS), param="grammar")


def test_the_same_schema_binds_both_endpoints_alike():
    llama = bound("/completion", json_schema=SCHEMA)
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    openai = bound("/v1/completions", response_format=form)
    assert llama.grammar == openai.grammar
    assert llama.starts == openai.starts == "answer"
    assert json.loads(llama.grammar.text)["required"] == ["n"]


def test_what_binds_nothing_is_taken():
    assert bound("/completion", grammar="") is None
    assert bound("/v1/completions", response_format={"type": "text"}) is None


def test_every_prompt_of_several_is_bound():
    engine = FakeEngine("1")
    form = {"type": "regex", "regex": "[0-9]"}
    assert post(engine, "/v1/completions", prompt=["a", "b"], response_format=form, n=2).is_success
    assert [asked.constraint.grammar.text for asked in engine.requests] == ["[0-9]"] * 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/completion", {"grammar": "root ::= x"}, "grammar"),
        ("/completion", {"grammar": "root ::= ("}, "grammar"),
        ("/completion", {"grammar": "leaf ::= [a]"}, "grammar"),
        ("/completion", {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "grammar"),
        ("/completion", {"grammar": 'root ::= "' + "a" * 300_000 + '"'}, "grammar"),
        ("/completion", {"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "json_"),
        ("/v1/completions", {"response_format": {"type": "regex", "regex": "("}}, "response_"),
    ],
)
def test_one_that_cannot_be_carried_out_is_refused_before_anything_runs(path, body, param):
    engine = FakeEngine("1")
    response = post(engine, path, **body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_schema"
    assert error_of(response)["param"].startswith(param)
    assert not engine.requests


def test_a_grammar_and_a_schema_contradict_each_other():
    response = post(FakeEngine(), "/completion", grammar=DIGITS, json_schema=SCHEMA)
    assert error_of(response)["param"] == "grammar"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([[64, 2.0], [65, -1]], {64: 2.0, 65: -1.0}),
        ([["ab", 3]], {64: 3.0, 65: 3.0}),
        ([["a", 3], [64, 1.5]], {64: 4.5}),
        ([[64, False]], {64: -100.0}),
        ({"64": 2.0, "b": False}, {64: 2.0, 65: -100.0}),
        ([["6", 1]], {21: 1.0}),
        ({}, {}),
    ],
)
def test_biases_by_id_and_by_text(value, found):
    assert biases(value) == found


@pytest.mark.parametrize(
    "value",
    [[64], [[64, 1, 2]], [[64, True]], [[64, "x"]], [[True, 1]], {"": 1}, [["a" * 2000, 1]]],
)
def test_a_bias_of_no_known_form_is_refused(value):
    response = post(FakeEngine(), "/completion", logit_bias=value)
    assert response.status_code == 400
    assert error_of(response)["param"] == "logit_bias"
