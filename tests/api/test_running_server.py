"""The SDKs that people use, against `civetta serve` on the embedded model, over real sockets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import anthropic
import httpx2
import openai
import pytest

pytestmark = pytest.mark.timeout(120)
GREEDY = {"temperature": 0}
LONG = "You are careful, and you say what you know in a few words. " * 12
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Ulm", "Köln"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a running server, without /v1."""
    environment = {k: v for k, v in os.environ.items() if k not in ("HOST", "PORT")}
    store = str(tmp_path_factory.mktemp("store"))
    command = [sys.executable, "-m", "civetta", "serve", "-p", "0", "--store", store]
    command += ["--threads", "1", "--api-key", "k"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the server did not start"
                found = re.search(r"curl .*(http://[^/]+)/v1", line)
            yield found[1]
        finally:
            process.terminate()
            process.communicate(timeout=30)


@pytest.fixture(scope="module")
def claude(url):
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(gpt):
    return gpt.models.list().data[0].id


def say(model, text, **more):
    return {
        "model": model,
        "max_tokens": 600,
        "messages": [{"role": "user", "content": text}],
        "extra_body": GREEDY,
        **more,
    }


def test_anthropic_answers_and_streams_the_same(claude, model):
    asked = say(model, "What is 17+25?")
    done = claude.messages.create(**asked)
    assert [block.text for block in done.content] == ["42"]
    assert done.stop_reason == "end_turn"
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "42"
    assert final.usage.output_tokens == done.usage.output_tokens
    counted = claude.messages.count_tokens(model=model, messages=asked["messages"])
    used = done.usage.input_tokens + done.usage.cache_read_input_tokens
    assert counted.input_tokens == used


def test_anthropic_thinks_within_its_budget(claude, model):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    done = claude.messages.create(
        **say(model, "What is 38+41?", thinking=thinking, max_tokens=2000)
    )
    assert [block.type for block in done.content] == ["thinking", "text"]
    assert done.content[1].text.strip() == "79"
    small = {"type": "enabled", "budget_tokens": 3}
    cut = claude.messages.create(**say(model, "What is 38+41?", thinking=small, max_tokens=2000))
    assert cut.usage.output_tokens_details.thinking_tokens < 12


def test_case_24_anthropic_calls_what_it_must(claude, model):
    tools = [{"name": "weather", "input_schema": SCHEMA}, {"name": "other", "input_schema": {}}]
    asked = say(model, "Hi", tools=tools, tool_choice={"type": "tool", "name": "weather"})
    done = claude.messages.create(**asked)
    (call,) = [block for block in done.content if block.type == "tool_use"]
    assert call.name == "weather"
    assert set(call.input) == {"city", "days"}
    assert isinstance(call.input["days"], int)
    assert done.stop_reason == "tool_use"
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [b.input for b in streamed.content if b.type == "tool_use"] == [call.input]


def test_case_12_and_1_a_nonce_leaves_the_prefix_in_the_cache(claude, model):
    def ask(nonce, *turns):
        header = f"x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={nonce};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": LONG}]
        messages = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant") * 9, turns, strict=False)
        ]
        return claude.messages.create(
            model=model, max_tokens=20, system=system, messages=messages, extra_body=GREEDY
        )

    first = ask("36ee5", "What is 17+25?")
    second = ask("91c0a", "What is 17+25?", first.content[0].text, "What is 60-14?")
    before = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert before > 100
    assert second.usage.cache_read_input_tokens >= before - 1


def test_openai_responses_answer_and_stream_the_same(gpt, model):
    asked = {"model": model, "input": "What is 17+25?", "temperature": 0}
    asked["reasoning"] = {"effort": "none"}
    done = gpt.responses.create(**asked)
    assert (done.output_text, done.status) == ("42", "completed")
    with gpt.responses.stream(**asked) as stream:
        kinds = [item.type for item in stream]
        final = stream.get_final_response()
    assert (final.output_text, kinds[-1]) == ("42", "response.completed")


def test_openai_responses_go_on_from_a_kept_one_without_computing_it_again(gpt, model):
    first = gpt.responses.create(
        model=model, input=[{"role": "user", "content": LONG + "What is 17+25?"}], temperature=0
    )
    second = gpt.responses.create(
        model=model, input="What is 60-14?", previous_response_id=first.id, temperature=0
    )
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    assert gpt.responses.retrieve(second.id).output_text == second.output_text
    gpt.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(second.id)


def test_case_24_openai_responses_call_what_they_must(gpt, model):
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    done = gpt.responses.create(
        model=model,
        input="Hi",
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=1500,
    )
    (call,) = [item for item in done.output if item.type == "function_call"]
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"city", "days"}
    assert isinstance(arguments["days"], int)


def test_case_34_a_schema_binds_both(gpt, claude, model):
    form = {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}
    done = gpt.responses.create(
        model=model,
        input="Weather of Ulm for 3 days?",
        text={"format": form},
        temperature=0,
        max_output_tokens=1500,
    )
    assert set(json.loads(done.output_text)) == {"city", "days"}
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = claude.messages.create(
        **say(model, "Weather of Ulm for 3 days?", output_config=config)
    )
    assert set(json.loads(message.content[-1].text)) == {"city", "days"}


def test_plain_completions_obey_grammars_schemas_and_biases(url):
    def post(path, **body):
        asked = {"prompt": "The numbers: ", "temperature": 0, **body}
        response = httpx2.post(f"{url}{path}", json=asked, headers={"x-api-key": "k"}, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    gbnf = 'root ::= item ("," item){2}\nitem ::= [0-9]{1,3}\n'
    listed = post("/completion", grammar=gbnf, n_predict=64)
    assert re.fullmatch(r"\d{1,3}(,\d{1,3}){2}", listed["content"])
    assert listed["stop_type"] == "eos"
    schema = json.loads(post("/completion", json_schema=SCHEMA, n_predict=256)["content"])
    assert schema["city"] in ("Ulm", "Köln")
    assert 1 <= schema["days"] <= 9
    form = {"type": "regex", "regex": "(yes|no)!"}
    said = post("/v1/completions", response_format=form, max_tokens=16)["choices"][0]
    assert said["text"] in ("yes!", "no!")
    yes = post(
        "/completion", grammar='root ::= "yes" | "no"', logit_bias=[["no", False], ["n", False]]
    )
    assert yes["content"] == "yes"


def test_case_49_logprobs_are_aligned_in_stream_and_buffer(gpt, model):
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Give a JSON object with a name and an age."}],
        "max_tokens": 40,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
        "extra_body": {"reasoning_effort": "none"},
    }
    done = gpt.chat.completions.create(**asked)
    entries = done.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == done.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 5
        best = max(entry.top_logprobs, key=lambda rival: rival.logprob)
        assert (best.token, best.logprob) == (entry.token, entry.logprob), "T = 0 takes the best"
    streamed, content = [], ""
    for chunk in gpt.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            streamed += choice.logprobs.content if choice.logprobs else []
    assert content == done.choices[0].message.content
    assert streamed == entries
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.chat.completions.create(**{**asked, "top_logprobs": 21})
    assert refused.value.param == "top_logprobs"
