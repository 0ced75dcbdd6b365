from __future__ import annotations

import hashlib
import io
import json
import struct
import sys
import threading

import pytest

from civetta.errors import CheckpointNotFound, ReadFailed
from fake_engine import FakeEngine

THOUGHT = "Let me think.\n</think>\n\nHello wörld"


class Stdin(io.TextIOWrapper):
    def __init__(self, raw: bytes):
        super().__init__(io.BytesIO(raw), encoding="utf-8")


def prompt_of(engine):
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def test_the_answer_is_all_of_stdout(civetta, use_engine):
    engine = FakeEngine(THOUGHT)
    (asked,) = [use_engine(engine)]
    result = civetta("prompt", "Hi", "-m", "x.gguf", "--seed", "5")
    assert (result.status, result.out) == (0, "Hello wörld\n")
    assert "Let me think." not in result.err
    assert result.err.count("\n") == 1
    assert "seed 5" in result.err
    assert "ended by stop" in result.err
    assert asked[0].model.model == "x.gguf"
    assert engine.requests[0].max_tokens == 128
    assert engine.closed


def test_the_trace_names_the_generated_tokens(civetta, use_engine):
    engine = FakeEngine(THOUGHT)
    use_engine(engine)
    result = civetta("prompt", "Hi", "-v")
    ids = engine.tokenizer.encode(THOUGHT)
    digest = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
    assert f"[TokenTrace] tokens={len(ids)} sha256={digest}\n" in result.err
    assert "Let me think." in result.err
    assert result.out == "Hello wörld\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["question"],
        ["-p", "question"],
        ["--prompt", "question"],
        ["-f", "FILE"],
        ["-"],
        ["-f", "-"],
    ],
)
def test_ways_to_give_the_prompt(civetta, use_engine, monkeypatch, tmp_path, arguments):
    (tmp_path / "q.txt").write_bytes(b"question")
    monkeypatch.setattr(sys, "stdin", Stdin(b"question"))
    engine = FakeEngine("ok")
    use_engine(engine)
    result = civetta("prompt", *[str(tmp_path / "q.txt") if a == "FILE" else a for a in arguments])
    assert result.status == 0
    assert "<|im_start|>user\nquestion<|im_end|>" in prompt_of(engine)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "There is no prompt"),
        (["a", "-p", "b"], "more than one prompt"),
        (["-p", "b", "-f", "c"], "more than one prompt"),
        (["a", "b"], "(b)"),
        ([""], "empty"),
        (["-f", "/nowhere.txt"], "/nowhere.txt"),
        (["-f", "BINARY"], "not UTF-8"),
        (["a", "--raw", "--system", "s"], "--raw"),
        (["a", "-n", "0"], "--max-tokens is '0'"),
        (["a", "--port", "1"], "--port"),
        (["a", "--think", "off", "--reasoning-effort", "low"], "--think is off"),
        (["a", "--cpu", "--device", "cuda"], "--cpu and --device cuda exclude each other"),
        (["a", "--raw", "--add-vision-id"], "--add-vision-id needs the chat template"),
        (["a", "--raw", "--thinking-budget", "4"], "--thinking-budget needs the chat template"),
        (["a", "--raw", "--reasoning-effort", "low"], "--reasoning-effort needs the chat template"),
        (["a", "--preserve-thinking", "on"], "--preserve-thinking"),
        (["a", "--think", "off", "--thinking-budget", "0"], "--thinking-budget needs thinking"),
    ],
)
def test_wrong_usage_is_refused_before_the_model_loads(
    civetta, use_engine, tmp_path, arguments, words
):
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    asked = use_engine(FakeEngine())
    result = civetta("prompt", *[str(tmp_path / "b") if a == "BINARY" else a for a in arguments])
    assert result.status == 2
    assert words in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert not asked


def test_system_think_and_sampling_flags_reach_the_engine(civetta, use_engine):
    engine = FakeEngine("ok")
    use_engine(engine)
    flags = ["--system", "Be brief.", "--think", "off", "--top-k", "3", "-n", "-1"]
    assert civetta("prompt", "Hi", *flags).out == "ok\n"
    assert prompt_of(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
    made = engine.requests[0]
    assert (made.sampling.top_k, made.sampling.temperature) == (3, 0.7)
    assert made.max_tokens is None


@pytest.mark.parametrize(
    ("flags", "device", "speculative"),
    [
        ([], "auto", "off"),
        (["--cpu"], "cpu", "off"),
        (["--cpu", "--device", "cpu"], "cpu", "off"),
        (["--prompt-lookup"], "auto", "lookup"),
        (["--prompt-lookup", "--speculative", "mtp"], "auto", "mtp"),
    ],
)
@pytest.mark.parametrize("command", [["prompt", "Hi"], ["chat"]])
def test_short_forms_of_settings(
    civetta, use_engine, monkeypatch, command, flags, device, speculative
):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    asked = use_engine(FakeEngine("ok"))
    assert civetta(*command, *flags).status == 0
    (settings,) = asked
    assert (settings.model.device, settings.drafting.speculative) == (device, speculative)


def test_what_the_environment_says_of_thoughts_is_for_all_commands(
    civetta, use_engine, monkeypatch
):
    for name, value in (("THINKING_BUDGET", "4"), ("PRESERVE_THINKING", "on"), ("THINK", "off")):
        monkeypatch.setenv(f"CIVETTA_{name}", value)
    for flags in ([], ["--raw"], ["--raw", "--thinking-budget", "-1"]):
        use_engine(FakeEngine("ok"))
        assert civetta("prompt", "Hi", *flags).status == 0


def test_raw_continues_the_text_without_template(civetta, use_engine):
    engine = FakeEngine(" upon a time </think>")
    use_engine(engine)
    assert civetta("prompt", "--raw", "Once").out == "Once upon a time </think>\n"
    assert prompt_of(engine) == "Once"
    use_engine(FakeEngine(" upon a time </think>"))
    assert civetta("prompt", "--raw", "--no-display-prompt", "Once").out == (
        " upon a time </think>\n"
    )


@pytest.mark.parametrize("flags", [(), ("--json",), ("--raw", "--json")])
def test_a_prompt_that_is_not_shown_anyway_cannot_be_hidden(civetta, use_engine, flags):
    use_engine(FakeEngine("ok"))
    result = civetta("prompt", "Once", "--no-display-prompt", *flags)
    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "--no-display-prompt" in result.err
    assert "drop it" in result.err


def test_json_is_one_object_with_everything(civetta, use_engine):
    use_engine(FakeEngine(THOUGHT, cached_tokens=2))
    result = civetta("prompt", "Hi", "--json", "--seed", "7")
    assert result.out.count("\n") == 1
    report = json.loads(result.out)
    assert report["content"] == "Hello wörld"
    assert report["reasoning"] == "Let me think."
    assert report["finish_reason"] == "stop"
    assert (report["seed"], report["cached_tokens"]) == (7, 2)
    assert report["completion_tokens"] == report["reasoning_tokens"] + len(
        "\n\nHello wörld".encode()
    )
    assert len(report["token_sha256"]) == 64


def test_a_reply_that_ends_within_its_thought_says_so(civetta, use_engine):
    use_engine(FakeEngine(THOUGHT))
    result = civetta("prompt", "Hi", "-n", "5")
    assert result.status == 0
    assert "still thinking: -n 5 is reached. Raise -n, or use --think off." in result.err


def test_failures_have_their_own_status(civetta, use_engine, monkeypatch):
    def fail(index):
        raise ReadFailed("The table could not be read.")

    engine = FakeEngine("abc", before_token=fail)
    use_engine(engine)
    result = civetta("prompt", "Hi")
    assert (result.status, result.out) == (1, "")
    assert result.err == "civetta: error[read_failed]: The table could not be read.\n"
    assert engine.closed
    use_engine(FakeEngine(context_tokens=5))
    too_long = civetta("prompt", "Hi")
    assert too_long.status == 2
    assert "context_length_exceeded" in too_long.err

    def missing(settings):
        raise CheckpointNotFound("There is no model.")

    monkeypatch.setattr("civetta.cli.engine_setup.build_engine", missing)
    assert civetta("prompt", "Hi").status == 1


def test_ctrl_c_cancels_and_exits_130(civetta, use_engine, monkeypatch):
    begun = threading.Event()
    engine = FakeEngine("x" * 10_000, before_token=lambda index: begun.wait(5))
    use_engine(engine)

    def interrupt(*_):
        begun.set()
        raise KeyboardInterrupt

    monkeypatch.setattr("civetta.cli.prompt._write", interrupt)
    monkeypatch.setattr("civetta.cli.prompt.printable", lambda *_: interrupt())
    result = civetta("prompt", "Hi", "--raw")
    assert result.status == 130
    assert engine.closed
    assert result.err == ""
