from __future__ import annotations

import json

import pytest

from api.serving import app_of, error_of, request, server
from civetta.options import SamplingOptions
from fake_engine import FakeEngine


def complete(engine, **body):
    return request(app_of(engine), "POST", "/completion", body={"prompt": "Hi", **body})


def events(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: {") for line in lines), "there is no closing marker"
    return [json.loads(line[6:]) for line in lines]


def test_the_buffered_reply_has_llama_cpps_fields():
    engine = FakeEngine("two\nlines", cached_tokens=1)
    reply = complete(engine, n_predict=50, temperature=0.5, seed=7, return_tokens=True).json()
    assert reply["content"] == "two\nlines"
    assert reply["tokens"] == engine.tokenizer.encode("two\nlines")
    assert (reply["stop"], reply["stop_type"], reply["stopping_word"]) == (True, "eos", "")
    assert (reply["tokens_predicted"], reply["tokens_evaluated"]) == (9, 2)
    assert reply["tokens_cached"] == reply["timings"]["cache_n"] == 1
    assert (reply["has_new_line"], reply["truncated"]) == (True, False)
    assert (reply["model"], reply["prompt"]) == ("fake-model", "Hi")
    settings = reply["generation_settings"]
    assert (settings["temperature"], settings["seed"], settings["n_predict"]) == (0.5, 7, 50)
    assert reply["timings"]["predicted_n"] == 9
    assert "completion_probabilities" not in reply


@pytest.mark.parametrize("text", ["ab", "wörld 🌍\n", "a 한글 👩‍👩‍👧 end", ""])
def test_the_stream_joins_to_the_buffered_reply(text):
    engine = FakeEngine(text)
    parts = events(complete(engine, stream=True))
    whole = complete(engine, return_tokens=True).json()
    assert "".join(part["content"] for part in parts) == whole["content"] == text
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    for name in ("stop_type", "tokens_predicted", "tokens_evaluated", "has_new_line", "truncated"):
        assert parts[-1][name] == whole[name]
    assert parts[-1]["timings"]["predicted_n"] == whole["tokens_predicted"]


@pytest.mark.parametrize(
    ("body", "kind", "word", "content"),
    [
        ({}, "eos", "", "hello"),
        ({"n_predict": 2}, "limit", "", "he"),
        ({"stop": ["lo"]}, "word", "lo", "hel"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_it_stopped(body, kind, word, content, stream):
    response = complete(FakeEngine("hello"), stream=stream, **body)
    parts = events(response) if stream else [response.json()]
    assert (parts[-1]["stop_type"], parts[-1]["stopping_word"]) == (kind, word)
    assert "".join(part["content"] for part in parts) == content


def test_probabilities_stand_beside_each_token():
    whole = complete(FakeEngine("ab"), n_probs=2).json()["completion_probabilities"]
    parts = events(complete(FakeEngine("ab"), n_probs=2, stream=True))
    streamed = [item for part in parts for item in part.get("completion_probabilities", [])]
    assert whole == streamed
    assert [item["token"] for item in whole] == ["a", "b"]
    assert all(len(item["top_logprobs"]) == 2 for item in whole)


def test_progress_and_timings_of_a_stream_when_asked_for():
    parts = events(
        complete(FakeEngine("ab"), stream=True, return_progress=True, timings_per_token=True)
    )
    assert parts[0]["prompt_progress"].keys() == {"total", "cache", "processed", "time_ms"}
    assert parts[0]["prompt_progress"]["processed"] == 2
    assert [part["timings"]["predicted_n"] for part in parts] == [0, 1, 2, 2]
    quiet = events(complete(FakeEngine("ab"), stream=True))
    assert not any("prompt_progress" in part for part in quiet)
    assert not any("timings" in part for part in quiet[:-1])


def test_a_prompt_may_mix_ids_and_texts():
    engine = FakeEngine()
    for prompt in ("ab", ["ab"], [64, 65], [[64, 65]], [64, "b"], ["a", 65]):
        assert complete(engine, prompt=prompt).status_code == 200
    expected = tuple(engine.tokenizer.encode("ab"))
    assert {asked.prompt_ids for asked in engine.requests} == {expected}


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1.5], [True], [None], {"a": 1}, None])
def test_several_or_odd_prompts_are_refused(prompt):
    response = complete(FakeEngine(), prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("typical_p", 0.9),
        ("dynatemp_range", 0.5),
        ("lora", [{"id": 0, "scale": 1}]),
        ("logit_bias", [[1, "much"]]),
        ("n_probs", 21),
        ("n_predict", 0),
        ("temperature", 3),
        ("samplers", ["top_k"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    response = complete(FakeEngine(), **{name: value})
    assert response.status_code == 400
    assert error_of(response)["param"] == name


def test_values_that_switch_a_feature_off_are_taken():
    engine = FakeEngine()
    neutral = {
        "mirostat": 0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0,
        "typical_p": 1.0,
        "dynatemp_range": 0,
        "lora": [],
        "logit_bias": [],
        "n_probs": 0,
        "n_predict": -1,
        "grammar": "",
        "n_keep": 5,
        "id_slot": -1,
        "cache_prompt": False,
        "ignore_eos": True,
        "seed": -1,
    }
    assert complete(engine, **neutral).status_code == 200
    asked = engine.requests[0]
    assert (asked.max_tokens, asked.use_cache, asked.ignore_eos) == (None, False, True)


def test_the_servers_defaults_hold_here_too():
    engine = FakeEngine("hello")
    app = app_of(engine, sampling=SamplingOptions(max_tokens=3, temperature=0.25))
    reply = request(app, "POST", "/completion", body={"prompt": "x"}).json()
    assert reply["content"] == "hel"
    assert engine.requests[0].sampling.temperature == 0.25


def test_a_model_id_that_is_not_served_is_a_404():
    response = complete(FakeEngine(), model="other")
    assert response.status_code == 404
    warned = request(
        app_of(FakeEngine("a"), **server(unknown_fields="warn")),
        "POST",
        "/completion",
        body={"prompt": "x", "samplers": ["top_k"]},
    )
    assert warned.headers["x-civetta-ignored"] == "samplers"
