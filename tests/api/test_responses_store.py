"""Kept responses: `--store DIR`, previous_response_id, reading, listing, deleting."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from contextlib import closing

import msgspec
import openai
import pytest

from api.serving import app_of, error_of, request, sdk, server
from api.test_chat_completions import CALL, THOUGHT
from api.test_responses import TWO_CALLS, WEATHER, prompt_of
from api.typed_events import typed_events
from civetta.api.responses import reply_types as replies
from civetta.api.responses.store import DAY_S, FILE_NAME, ResponseStore, Stored
from civetta.errors import StoreUnusable
from fake_engine import FakeEngine


@pytest.fixture
def kept(tmp_path):
    """An app that keeps responses, with its engine and its folder."""
    folder = tmp_path / "kept"
    engine = FakeEngine(THOUGHT)
    app = app_of(engine, **server(store=str(folder)))
    yield app, engine, folder
    app.state.responses.close()


def post(app, **body):
    return request(app, "POST", "/v1/responses", body={"input": "Hi", **body})


def test_openai_sdk_goes_on_reads_lists_and_deletes(kept):
    app, engine, _ = kept

    async def run():
        async with sdk(app) as client:
            api = client.responses
            first = await api.create(model="fake-model", input="Hi", instructions="Be brief.")
            again = await api.retrieve(first.id)
            second = await api.create(
                model="fake-model", input="And now?", previous_response_id=first.id
            )
            items = [item async for item in api.input_items.list(second.id)]
            await api.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await api.retrieve(first.id)
            return first, again, second, items

    first, again, second, items = asyncio.run(run())
    assert again.to_dict() == first.to_dict()
    assert first.store is True
    assert second.previous_response_id == first.id
    assert [item.content[0].text for item in items] == ["And now?"]
    prompt = prompt_of(engine)
    assert "Be brief." not in prompt  # instructions are those of the request
    assert "Hi<|im_end|>" in prompt
    assert "<think>\nLet me think.\n</think>\n\nHello wörld 🌍<|im_end|>" in prompt
    assert "And now?<|im_end|>" in prompt


def test_a_streamed_response_is_there_when_its_stream_ended(kept):
    app, _, _ = kept
    events = typed_events(post(app, stream=True).text)
    response = events[-1]["response"]
    assert request(app, "GET", f"/v1/responses/{response['id']}").json() == response


def test_a_chain_of_calls_renders_like_the_whole_conversation(tmp_path):
    engine = FakeEngine(TWO_CALLS)
    app = app_of(engine, **server(store=str(tmp_path)))
    first = post(app, tools=[WEATHER]).json()
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}
        for call in calls
    ]
    post(app, tools=[WEATHER], input=outputs, previous_response_id=first["id"])
    chained = prompt_of(engine)
    history = [{"role": "user", "content": "Hi"}, *first["output"], *outputs]
    post(app, tools=[WEATHER], input=history)
    assert prompt_of(engine) == chained
    assert chained.count("<tool_response>\ndry") == 2
    app.state.responses.close()


def test_kept_responses_outlive_the_server(kept):
    app, _, folder = kept
    response = post(app).json()
    app.state.responses.close()
    later = app_of(FakeEngine(CALL), **server(store=str(folder)))
    assert request(later, "GET", f"/v1/responses/{response['id']}").json() == response
    assert post(later, previous_response_id=response["id"]).status_code == 200
    later.state.responses.close()


def test_replies_are_what_openapi_says(kept):
    app, _, _ = kept
    path = f"/v1/responses/{post(app).json()['id']}"
    items = request(app, "GET", f"{path}/input_items").json()
    msgspec.convert(items, replies.InputItems, strict=True)
    msgspec.convert(request(app, "GET", path).json(), replies.Response, strict=True)
    msgspec.convert(request(app, "DELETE", path).json(), replies.ResponseDeleted, strict=True)


def test_store_false_is_not_kept(kept):
    app, _, _ = kept
    response = post(app, store=False).json()
    assert response["store"] is False
    reply = request(app, "GET", f"/v1/responses/{response['id']}")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "response_not_found")


def test_what_is_not_there_is_a_plain_400(kept):
    app, _, _ = kept
    reply = post(app, previous_response_id="resp_nothing")
    assert reply.status_code == 400
    error = error_of(reply)
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id"


def test_a_chain_with_a_deleted_link_cannot_be_continued(kept):
    app, _, _ = kept
    first = post(app).json()
    second = post(app, previous_response_id=first["id"]).json()
    gone = request(app, "DELETE", f"/v1/responses/{first['id']}")
    assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
    reply = post(app, previous_response_id=second["id"])
    assert error_of(reply)["code"] == "previous_response_not_found"


def test_input_items_come_a_page_at_a_time(kept):
    app, _, _ = kept
    given = [{"role": "user", "content": str(n)} for n in range(5)]
    path = f"/v1/responses/{post(app, input=given).json()['id']}/input_items"

    def page(query):
        return request(app, "GET", f"{path}?{query}").json()

    newest = page("limit=2")
    assert [item["content"] for item in newest["data"]] == ["4", "3"]
    assert newest["has_more"]
    rest = page(f"limit=100&after={newest['last_id']}")
    assert [item["content"] for item in rest["data"]] == ["2", "1", "0"]
    assert not rest["has_more"]
    assert [item["content"] for item in page("order=asc")["data"]] == list("01234")
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        reply = request(app, "GET", f"{path}?{query}")
        assert (reply.status_code, error_of(reply)["param"]) == (400, param)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_without_a_store_there_are_no_responses(method):
    reply = request(app_of(FakeEngine()), method, "/v1/responses/resp_1")
    assert reply.status_code == 404
    assert "--store DIR" in error_of(reply)["message"]


def test_the_file_is_for_its_owner_alone(kept):
    app, _, folder = kept
    post(app)
    assert stat.S_IMODE((folder / FILE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def stored(response_id, created_at=0):
    response = {"id": response_id, "created_at": created_at, "previous_response_id": None}
    return Stored(response={**response, "output": []}, input_items=[])


def test_old_responses_go_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("civetta.api.responses.store.time.time", lambda: 40 * DAY_S)
    base = ResponseStore(tmp_path, days=30)
    base.put(stored("old", 9 * DAY_S))
    base.put(stored("new", 11 * DAY_S))
    assert asyncio.run(base.get("old")) is None
    assert asyncio.run(base.get("new")) is not None
    base.close()


def test_zero_days_keep_for_good(tmp_path):
    base = ResponseStore(tmp_path, days=0)
    base.put(stored("old", 1))
    base.put(stored("new", 2))
    assert asyncio.run(base.get("old")) == stored("old", 1)
    base.close()
    base.close()


def test_a_write_that_fails_is_logged_and_harms_nothing(tmp_path, caplog):
    base = ResponseStore(tmp_path, days=0)
    base.put(stored("same"))
    base.put(stored("same"))
    assert asyncio.run(base.get("same")) == stored("same")
    base.close()
    assert "response_not_kept" in caplog.text


def test_a_file_of_another_format_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as base:
        base.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreUnusable, match="format 99"):
        ResponseStore(tmp_path, days=0)


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="another --store"):
        ResponseStore(tmp_path / "file" / "below", days=0)
