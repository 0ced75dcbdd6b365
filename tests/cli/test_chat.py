from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from civetta.chat.template import TemplateOptions
from civetta.cli.chat_session import ChatSession, CommandFault
from civetta.errors import ReadFailed
from fake_engine import FakeEngine

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def talk(civetta, use_engine, monkeypatch):
    """Run `civetta chat` over piped lines with a fake engine."""

    def run(engine, *lines, flags=()):
        use_engine(engine)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return civetta("chat", *flags)

    return run


def prompts_of(engine):
    return [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests]


def test_a_piped_conversation(talk):
    engine = FakeEngine(lambda request: f"t</think>\n\nreply {len(request.prompt_ids) % 7}")
    result = talk(engine, "Hello", "", "And now?")
    assert result.status == 0
    assert result.err == ""
    first, second = prompts_of(engine)
    assert "<|im_start|>user\nHello<|im_end|>" in first
    assert "<think>\nt\n</think>\n\nreply " in second
    assert second.count("<|im_start|>user") == 2
    assert result.out.count("[answer]\nreply") == 2
    assert result.out.count("[thinking]\nt\n") == 2
    assert engine.closed


def test_commands_over_a_pipe(talk, tmp_path):
    engine = FakeEngine("ok")
    path = tmp_path / "talk.json"
    result = talk(
        engine,
        "/think off", "/system Be brief.", "One", "/retry", f"/save {path}", "/clear", "Two",
        "/think low", f"/load {path}", "Three", "/stats", "/help", "/quit", "never read",
    )  # fmt: skip
    one, retry, two, three = prompts_of(engine)
    assert one == retry
    assert one.startswith("<|im_start|>system\nBe brief.")
    assert one.endswith("</think>\n\n")
    assert "One" not in two
    assert "One" in three
    assert "Two" not in three
    assert three.endswith("<think>\n")
    assert "ended by stop" in result.err
    assert "/save FILE" in result.err
    saved = json.loads(path.read_text())
    assert [item["content"] for item in saved["messages"]] == ["One", "ok"]
    assert list(tmp_path.iterdir()) == [path]


def test_errors_do_not_end_the_conversation_but_count(talk):
    def fail_first(index):
        if len(engine.requests) == 1:
            raise ReadFailed("The table could not be read.")

    engine = FakeEngine("ok", before_token=fail_first)
    result = talk(engine, "/thinkk", "One", "Two", flags=["--think", "off"])
    assert result.status == 1
    assert "error[command]: Unknown command /thinkk: did you mean /think?" in result.err
    assert "error[read_failed]" in result.err
    assert "One" not in prompts_of(engine)[1]
    assert result.out == "ok\n"


def test_flags_and_continued_lines(talk):
    engine = FakeEngine("ok")
    flags = ["--system", "S", "-n", "9", "--temperature", "0"]
    talk(engine, "first\\", "second", "//quit is a word", flags=flags)
    first, second = prompts_of(engine)
    assert "user\nfirst\nsecond<|im_end|>" in first
    assert "user\n/quit is a word<|im_end|>" in second
    assert engine.requests[0].max_tokens == 9
    assert engine.requests[0].sampling.temperature == 0


def test_a_trace_with_v(talk):
    result = talk(FakeEngine("ok"), "Hi", flags=["-v"])
    assert "[TokenTrace] tokens=2 sha256=" in result.err


def test_input_that_is_no_text(civetta, use_engine, monkeypatch):
    use_engine(FakeEngine("ok"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    result = civetta("chat")
    assert result.status == 2
    assert "not UTF-8" in result.err


@pytest.fixture
def session():
    return ChatSession(template=TemplateOptions())


@pytest.mark.parametrize(
    ("mode", "thinking", "effort"),
    [
        ("on", True, "auto"), ("off", False, "auto"), ("low", True, "low"),
        ("medium", True, "medium"), ("xhigh", True, "xhigh"),
    ],
)  # fmt: skip
def test_think_modes(session, mode, thinking, effort):
    session.take("/think low")
    session.take(f"/think {mode}")
    assert session.template.thinking is thinking
    assert session.template.reasoning_effort == effort


@pytest.mark.parametrize(
    "line", ["/think", "/think maybe", "/retry", "/save", "/load", "/nope", "/", "/load /nowhere"]
)
def test_commands_that_cannot_be_carried_out(session, line):
    with pytest.raises(CommandFault):
        session.take(line)
    assert session.conversation().messages == ()


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"format": "x", "system": null, "messages": []}',
        '{"format": "civetta-chat-1", "system": 5, "messages": []}',
        '{"format": "civetta-chat-1", "system": null, "messages": [{"role": "user"}]}',
        '{"format": "civetta-chat-1", "system": null, "messages": '
        '[{"role": "tool", "content": "x", "reasoning": null}]}',
        '{"format": "civetta-chat-1", "system": null, "messages": '
        '[{"role": "user", "content": "x", "reasoning": 1}]}',
    ],
)  # fmt: skip
def test_foreign_files_are_not_loaded(session, tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    session.take("hello")
    with pytest.raises(CommandFault, match="not a conversation"):
        session.take(f"/load {path}")
    assert len(session.messages) == 1


def test_system_message_can_be_shown_and_removed(session):
    assert session.take("/system").note == "There is no system message."
    session.take("/system Be kind.")
    assert session.take("/system").note == "Be kind."
    session.take("/system off")
    assert session.system is None


def test_quit_and_blank_lines(session):
    assert session.take("/quit").leave
    assert session.take("/exit").leave
    assert not session.take("   ").ask


class Terminal:
    """`civetta chat` on a pseudo terminal, with a fake engine."""

    def __init__(self, reply, token_s=0.0, **env):
        code = (
            f"import sys, time; sys.path.insert(0, {TESTS!r})\n"
            "from fake_engine import FakeEngine\n"
            "from civetta.cli import engine_setup\n"
            "from civetta.cli.main import main\n"
            f"engine_setup.build_engine = lambda _: FakeEngine({reply!r},"
            f" before_token=lambda index: time.sleep({token_s}))\n"
            "main()\n"
        )
        self.master, slave = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "chat"],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**environment, "TERM": "xterm", **env},
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    @property
    def plain(self):
        return self.seen.replace("\x1b[2m", "").replace("\x1b[0m", "")

    def until(self, words, count=1):
        limit = time.monotonic() + 20
        while self.plain.count(words) < count:
            ready, _, _ = select.select([self.master], [], [], 0.2)
            if ready:
                try:
                    self.seen += os.read(self.master, 4096).decode(errors="replace")
                except OSError:
                    break
            if time.monotonic() > limit:
                break
        assert self.plain.count(words) >= count, self.plain[-500:]

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self):
        # readline shows the prompt a moment before it waits in a way that a signal can end
        time.sleep(0.3)
        self.process.send_signal(signal.SIGINT)


def test_ctrl_c_stops_the_reply_and_returns_to_the_prompt():
    with Terminal("y" * 100_000, token_s=0.002) as terminal:
        terminal.until("/help lists")
        terminal.until("> ")
        terminal.type("Hi\n")
        terminal.until("yyy")
        terminal.interrupt()
        terminal.until("> ", 2)
        terminal.type("/stats\n")
        terminal.until("ended by cancelled")
        terminal.type("/quit\n")
        assert terminal.process.wait(10) == 0
        assert "Traceback" not in terminal.seen


def test_ctrl_c_twice_at_the_prompt_leaves():
    with Terminal("ok") as terminal:
        terminal.until("> ")
        terminal.interrupt()
        terminal.until("Ctrl+C again leaves")
        terminal.until("> ", 2)
        terminal.interrupt()
        assert terminal.process.wait(10) == 130


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_reasoning_is_dim_where_colours_are_wanted(env):
    with Terminal("deep\n</think>\n\nshort \x1b[31m[b]:smile:", **env) as terminal:
        terminal.until("> ")
        terminal.type("Hi\n")
        terminal.until(":smile:")
        terminal.until("> ", 2)
        dim = "\x1b[2m" in terminal.seen
        assert dim is (not env)
        assert ("[thinking]" in terminal.seen) is bool(env)
        assert "\x1b[31m" not in terminal.seen
        assert "[b]:smile:" in terminal.plain
