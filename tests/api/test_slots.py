from __future__ import annotations

import pytest

from api.serving import app_of, error_of, request, server
from civetta.engine.protocol import RequestView
from civetta.options import EngineOptions, ReasoningOptions, SamplingOptions
from fake_engine import FakeEngine


def view(**values):
    fields = {
        "request_id": "r17",
        "state": "decoding",
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "processed_tokens": 100,
        "generated_tokens": 5,
        "max_tokens": 20,
    }
    return RequestView(**(fields | values))


def slots(*views, sessions=3, query=""):
    engine = FakeEngine()
    engine.active = views
    app = app_of(engine, engine=EngineOptions(sessions=sessions))
    return request(app, "GET", f"/slots{query}")


def test_slots_tell_what_runs_and_what_is_idle():
    waits = view(request_id="r19", state="queued")
    busy, unlimited, idle = slots(view(), view(request_id="r18", max_tokens=None), waits).json()
    assert busy["is_processing"]
    assert (busy["id_task"], busy["request_id"]) == (17, "r17")
    assert (busy["n_prompt_tokens"], busy["n_prompt_tokens_cache"]) == (100, 60)
    assert busy["n_prompt_tokens_processed"] == 100
    assert busy["next_token"] == [{"n_decoded": 5, "n_remain": 15}]
    assert unlimited["next_token"][0]["n_remain"] == -1
    assert idle == {
        "id": 2,
        "n_ctx": 4096,
        "speculative": False,
        "is_processing": False,
        "prompt": "",
        "state": "idle",
    }


def test_fail_on_no_slot_is_for_load_balancers():
    assert slots(view(), sessions=2, query="?fail_on_no_slot=1").status_code == 200
    taken = slots(view(), view(), sessions=2, query="?fail_on_no_slot=1")
    assert taken.status_code == 503
    assert error_of(taken)["code"] == "no_slot_free"
    assert slots(view(), view(), sessions=2).status_code == 200


def test_props_tell_the_defaults_and_no_path():
    app = app_of(
        FakeEngine(context_tokens=777),
        engine=EngineOptions(sessions=3),
        sampling=SamplingOptions(temperature=0.5, max_tokens=9),
        reasoning=ReasoningOptions(think="off"),
        **server(served_model_name="nano"),
    )
    props = request(app, "GET", "/props").json()
    assert (props["total_slots"], props["model_alias"], props["n_ctx"]) == (3, "nano", 777)
    assert props["model_path"] == "fake.gguf"
    assert props["modalities"] == {"vision": False, "audio": False}
    params = props["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_p"], params["presence_penalty"]) == (0.5, 0.8, 1.5)
    assert (params["n_predict"], params["seed"]) == (9, -1)


@pytest.mark.parametrize("path", ["/slots", "/props"])
def test_they_wait_for_the_model(path):
    assert request(app_of(None), "GET", path).status_code == 503
