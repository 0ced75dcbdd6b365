from __future__ import annotations

import asyncio

import pytest

from api.serving import app_of, error_of, events_of, request, sdk
from civetta.options import SamplingOptions
from civetta.types import SamplingParams
from fake_engine import FakeEngine


def complete(engine, **body):
    return request(app_of(engine), "POST", "/v1/completions", body={"prompt": "Hi", **body})


def test_openai_sdk_completes():
    engine = FakeEngine("wörld 🌍")

    async def run():
        async with sdk(app_of(engine)) as client:
            return await client.completions.create(model="fake-model", prompt="Hi", max_tokens=50)

    done = asyncio.run(run())
    assert done.choices[0].text == "wörld 🌍"
    assert done.choices[0].finish_reason == "stop"
    assert done.usage.prompt_tokens == 2
    assert done.usage.total_tokens == 2 + done.usage.completion_tokens
    assert engine.requests[0].prompt_ids == tuple(engine.tokenizer.encode("Hi"))
    assert engine.requests[0].max_tokens == 50


def test_openai_sdk_streams_the_same_text_as_the_buffer():
    engine = FakeEngine("a 한글 👩‍👩‍👧 end")

    async def run():
        async with sdk(app_of(engine)) as client:
            stream = await client.completions.create(
                model="fake-model",
                prompt="Hi",
                stream=True,
                stream_options={"include_usage": True},
            )
            return [chunk async for chunk in stream]

    chunks = asyncio.run(run())
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == "a 한글 👩‍👩‍👧 end"
    assert not any("\ufffd" in text for text in texts)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == engine.finished[0].usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].timings["predicted_n"] == chunks[-1].usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_include_usage_has_no_usage_chunk():
    events = events_of(complete(FakeEngine("ab"), stream=True).text)
    assert all(event["choices"] for event in events)
    assert "timings" in events[-1]


def test_token_ids_as_prompt():
    engine = FakeEngine()
    assert complete(engine, prompt=[5, 6, 7]).status_code == 200
    assert complete(engine, prompt=[[8, 9]]).status_code == 200
    assert complete(engine, prompt=["x"]).status_code == 200
    ids = [item.prompt_ids for item in engine.requests]
    assert ids == [(5, 6, 7), (8, 9), tuple(engine.tokenizer.encode("x"))]


@pytest.mark.parametrize(
    "prompt", [[1, "a"], [[1], 2], [["a"]], ["a", [1.5]], [1.5], [True], {"a": 1}, None]
)
def test_odd_prompts_are_refused(prompt):
    response = complete(FakeEngine(), prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("prompt")


def test_stop_string_is_cut_and_reported():
    engine = FakeEngine("alpha beta gamma delta")
    body = complete(engine, stop=["ta gam"]).json()
    assert body["choices"][0]["text"] == "alpha be"
    assert body["choices"][0]["finish_reason"] == "stop"
    streamed = events_of(complete(engine, stop="ta gam", stream=True).text)
    assert "".join(item["choices"][0]["text"] for item in streamed) == "alpha be"


def test_length_is_reported():
    body = complete(FakeEngine("abcdef"), max_tokens=3).json()
    assert body["choices"][0] == {
        "index": 0, "text": "abc", "logprobs": None, "finish_reason": "length",
    }  # fmt: skip


def test_legacy_logprobs_are_parallel_lists():
    body = complete(FakeEngine("né"), logprobs=2).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 1]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    events = events_of(complete(FakeEngine("né"), logprobs=2, stream=True).text)
    parts = [item["choices"][0]["logprobs"] for item in events]
    assert [token for part in parts if part for token in part["tokens"]] == logprobs["tokens"]


def test_sampling_of_request_server_and_preset():
    engine = FakeEngine()
    app = app_of(engine, sampling=SamplingOptions(temperature=0.3, top_k=7, max_tokens=9))
    body = {"prompt": "Hi", "temperature": 0, "seed": 11, "repeat_penalty": 1.1, "ignore_eos": True}
    assert request(app, "POST", "/v1/completions", body=body).status_code == 200
    made = engine.requests[0]
    assert made.sampling == SamplingParams(
        temperature=0, top_k=7, top_p=0.95, seed=11, repeat_penalty=1.1
    )
    assert made.max_tokens == 9
    assert made.ignore_eos


def test_other_spellings_of_off():
    engine = FakeEngine()
    assert complete(engine, top_k=-1, min_keep=0, seed=-1, max_tokens=-1).status_code == 200
    made = engine.requests[0]
    assert (made.sampling.top_k, made.sampling.min_keep, made.max_tokens) == (0, 1, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1), ("temperature", -0.1), ("temperature", "hot"), ("top_p", 1.5),
        ("top_k", -2), ("top_k", 1.5), ("min_p", -1), ("min_keep", -1), ("seed", 2**64),
        ("seed", -2), ("repeat_penalty", 0), ("repeat_last_n", -2), ("frequency_penalty", 3),
        ("presence_penalty", -3), ("max_tokens", 0), ("max_tokens", -5), ("logprobs", 21),
        ("logprobs", -1), ("n", 0), ("n", 129), ("best_of", 3), ("suffix", "x"),
        ("logit_bias", {"x": 1}), ("stop", ""), ("stop", ["a", ""]), ("stop", ["x"] * 17),
        ("stop", "x" * 4097), ("stop", 5), ("stream_options", {"include_usage": True}),
        ("temprature", 1), ("stream", "yes"), ("timings_per_token", True),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(field, value):
    engine = FakeEngine()
    response = complete(engine, **{field: value})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"].split("[")[0].split(".")[0] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


def test_neutral_values_are_accepted():
    body = {
        "n": 1, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "user": "u",
        "stop": None, "temperature": None, "seed": None, "max_tokens": None, "stream": False,
        "stream_options": None, "cache_prompt": True, "logprobs": None,
    }  # fmt: skip
    assert complete(FakeEngine(), **body).status_code == 200


def test_unknown_field_names_the_nearest():
    error = error_of(complete(FakeEngine(), temprature=1))
    assert error["code"] == "unsupported_parameter"
    assert "did you mean temperature?" in error["message"]


def test_server_timing_adds_up():
    timing = complete(FakeEngine()).headers["server-timing"]
    durations = dict(part.split(";dur=") for part in timing.split(", "))
    assert set(durations) == {"queue", "ttft", "inter_token", "total"}
    assert float(durations["ttft"]) == pytest.approx(11.0)
