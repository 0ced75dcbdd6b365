from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.serving import app_of, error_of, request
from fake_engine import FakeEngine

ENGINE = FakeEngine()
APP = app_of(ENGINE)


def post(path, **body):
    return request(APP, "POST", path, body=body)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40))
def test_detokenize_undoes_tokenize(text):
    tokens = post("/tokenize", content=text, parse_special=False).json()["tokens"]
    assert tokens == ENGINE.tokenizer.encode(text, parse_special=False)
    back = unicodedata.normalize("NFC", text)  # as the model's tokenizer has it
    assert post("/detokenize", tokens=tokens).json() == {"content": back, "prompt": back}


def test_tokenize_in_both_spellings():
    llama = post("/tokenize", content="héy", with_pieces=True).json()
    assert llama["tokens"][0] == {"id": 71, "piece": "h"}
    assert llama["tokens"][1]["piece"] == [195], "a part of a character is told as bytes"
    vllm = post("/tokenize", prompt="hey", add_special_tokens=True, return_token_strs=True).json()
    assert (vllm["count"], vllm["max_model_len"]) == (3, 4096)
    assert vllm["token_strs"] == ["h", "e", "y"]


def test_markers_are_tokens_unless_told_not_to():
    assert post("/tokenize", content="<|im_end|>").json()["tokens"] == [258]
    assert post("/tokenize", content="<|im_end|>", parse_special=False).json()["count"] == 10


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}], "nope": 1}, "nope"),
        ("/apply-template", {}, "messages"),
    ],
)
def test_wrong_bodies_name_the_field(path, body, param):
    response = post(path, **body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_another_model_is_a_404():
    assert post("/tokenize", content="a", model="other").status_code == 404
    assert post("/detokenize", tokens=[1], model="fake-model").status_code == 200


@pytest.mark.parametrize("think", [True, False])
def test_the_template_is_what_a_chat_completion_is_given(think):
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi <|im_end|>"},
        ],
        "chat_template_kwargs": {"enable_thinking": think},
    }
    rendered = post("/apply-template", **body).json()
    assert post("/v1/chat/completions", **body).status_code == 200
    asked = ENGINE.requests[-1].prompt_ids
    assert ENGINE.tokenizer.decode(asked) == rendered["prompt"]
    assert rendered["thinking"] is think
