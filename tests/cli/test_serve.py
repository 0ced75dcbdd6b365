from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import openai
import pytest

TESTS = Path(__file__).parents[1]
START = """
import sys, time, threading
sys.path.insert(0, {tests!r})
from fake_engine import FakeEngine
from civetta.cli import engine_setup, serve
from civetta.cli.main import main
from civetta.errors import CheckpointNotFound

def missing(settings):
    raise CheckpointNotFound("There is no model at x.gguf.")

def never(settings):
    time.sleep(600)

def engine(settings):
    made = FakeEngine(
        {reply!r},
        before_start=lambda: sys.stderr.write("STARTED\\n"),
        before_token=lambda index: time.sleep({token_s}),
    )
    close = made.close
    made.close = lambda: (close(), sys.stderr.write("ENGINE CLOSED\\n"))
    ended, write = made.ended.release, sys.stderr.write
    made.ended.release = lambda: (ended(), write(f"ENDED {{made.finished[-1].reason}}\\n"))
    return made

def stuck(settings):
    from civetta.engine.engine import Engine
    from engine.fakes import ByteTokenizer, FakeModel, info

    def hang(session, ids):
        sys.stderr.write("STARTED\\n")
        threading.Event().wait()

    model = FakeModel(lambda ids: 97, on_forward=hang)
    return Engine(
        model, info(), tokenizer=ByteTokenizer(), template=None, options=settings.engine
    )

def lost(settings):
    from civetta.engine import engine as engine_module
    from civetta.engine.engine import Engine
    from engine.fakes import ByteTokenizer, FakeModel, info

    def fail(session, ids):
        raise RuntimeError("CUDA error: unspecified launch failure")

    engine_module.device_fault = lambda device: "it is gone"
    model = FakeModel(lambda ids: 97, on_forward=fail)
    return Engine(
        model, info(), tokenizer=ByteTokenizer(), template=None, options=settings.engine
    )

serve.TELL_S = {tell_s}
engine_setup.build_engine = {build}
main()
"""


class Serving:
    """A server process; reads its stderr on a thread."""

    def __init__(self, *flags, build="engine", reply="hello", token_s=0.0, tell_s=5, before=()):
        code = START.format(
            tests=str(TESTS), reply=reply, token_s=token_s, build=build, tell_s=tell_s
        )
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", code, "serve", "-p", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={key: value for key, value in os.environ.items() if key not in ("HOST", "PORT")},
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def line(self, words):
        with self._changed:
            found = self._changed.wait_for(lambda: [x for x in self.lines if words in x], 20)
        assert found, self.lines
        return found[0]

    def times(self, line, n):
        with self._changed:
            found = self._changed.wait_for(lambda: self.lines.count(line) == n, 20)
        assert found, self.lines

    @property
    def url(self):
        return self.line("civetta serves").split(" at ")[1].split("/v1;")[0]

    def end(self, sig=None, timeout_s=15):
        if sig is not None:
            self.process.send_signal(sig)
        status = self.process.wait(timeout_s)
        self._reader.join()
        return status

    def _read(self):
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()


def test_start_answers_the_sdk_and_ends_on_sigterm():
    with Serving("--served-model-name", "nano", "--api-key", "sesame") as serving:
        start = serving.line("civetta serves nano")
        assert f"curl {serving.url}/v1/chat/completions" in start
        assert "sesame" not in start
        with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="sesame", max_retries=0) as client:
            done = client.completions.create(model="nano", prompt="Hi")
            assert done.choices[0].text == "hello"
            texts = client.completions.create(model="nano", prompt="Hi", stream=True)
            assert "".join(chunk.choices[0].text for chunk in texts) == "hello"
        assert serving.end(signal.SIGTERM) == 0
        assert "ENGINE CLOSED" in serving.lines
        assert not [line for line in serving.lines if "Traceback" in line]
        assert serving.process.stdout.read() == ""


def test_a_client_that_hangs_up_frees_the_engine():
    with Serving(reply="x" * 100_000, token_s=0.002) as serving:
        host, port = serving.url.removeprefix("http://").split(":")
        for stream in (True, False):
            body = json.dumps({"prompt": "x", "stream": stream})
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(
                    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                    f"\r\n{body}".encode()
                )
                if stream:
                    connection.recv(100)
                else:
                    serving.times("STARTED", 2)
        with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="-", max_retries=0) as client:
            question = [{"role": "user", "content": "Hi"}]
            with client.chat.completions.create(
                model="fake-model", messages=question, stream=True
            ) as stream:
                next(iter(stream))
        serving.times("ENDED cancelled", 3)
        serving.line("status=499")


def test_sigterm_lets_a_running_reply_end():
    with Serving(reply="y" * 100, token_s=0.01) as serving:
        url = f"{serving.url}/v1/completions"
        with httpx2.stream("POST", url, json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            serving.process.send_signal(signal.SIGTERM)
            rest = "\n".join(lines)
        assert rest.count('"text":"y"') >= 98
        assert rest.rstrip().endswith("data: [DONE]")
        assert serving.end() == 0
        assert "ENDED stop" in serving.lines


def test_a_reply_that_outlasts_the_drain_is_cut_off_and_told():
    flags = ("--drain-timeout", "0.3")
    with Serving(*flags, reply="y" * 100_000, token_s=0.002) as serving:
        url = f"{serving.url}/v1/completions"
        with httpx2.stream("POST", url, json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            serving.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert json.loads(rest[-1][6:])["error"]["code"] == "not_ready"
        assert serving.end() == 0
        assert "ENDED cancelled" in serving.lines
        assert not [line for line in serving.lines if "Traceback" in line]


def test_delete_ends_a_request_from_another_connection():
    with Serving(reply="y" * 100_000, token_s=0.002) as serving:
        url = f"{serving.url}/v1/completions"
        with httpx2.stream("POST", url, json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            request_id = response.headers["x-request-id"]
            deleted = httpx2.delete(f"{serving.url}/v1/requests/{request_id}")
            rest = [line for line in lines if line.startswith("data: ")]
        assert deleted.json()["aborted"]
        assert json.loads(rest[-1][6:])["error"]["code"] == "request_aborted"
        assert serving.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGINT)])
def test_a_step_that_never_ends_is_left_behind(signals):
    """The wait is bounded: by what a step may take, and a second signal makes it short."""
    longest_ms = "200" if len(signals) == 1 else "3600000"
    flags = ("--drain-timeout", "0.1", "--stall-timeout-ms", longest_ms)
    with Serving(*flags, build="stuck", tell_s=0.5) as serving:
        url = f"{serving.url}/v1/completions"
        with httpx2.stream("POST", url, json={"prompt": "x", "stream": True}) as response:
            request_id = response.headers["x-request-id"]
            serving.line("STARTED")
            for sig in signals:
                serving.process.send_signal(sig)
            assert serving.end(timeout_s=60) == 1
        line = serving.line("left_stuck")
        assert f"running={request_id}" in line
        assert "a step or a write hangs" in line
        assert not [line for line in serving.lines if "Traceback" in line]


def test_a_terminal_that_goes_away_stops_the_server_in_order():
    with Serving() as serving:
        assert serving.url
        assert serving.end(signal.SIGHUP) == 0
        assert "ENGINE CLOSED" in serving.lines
        assert "cause=SIGHUP" in serving.line(" stopping ")


def test_under_nohup_a_terminal_that_goes_away_stops_nothing():
    with Serving(before=("nohup",)) as serving:
        assert serving.url
        serving.process.send_signal(signal.SIGHUP)
        assert httpx2.get(f"{serving.url}/health").status_code == 200
        assert serving.end(signal.SIGTERM) == 0
        assert "cause=SIGTERM" in serving.line(" stopping ")


def test_a_fault_in_compiled_code_leaves_a_trace_without_text():
    with Serving() as serving:
        assert serving.url
        assert serving.end(signal.SIGSEGV) == -signal.SIGSEGV
        assert "Fatal Python error: Segmentation fault" in serving.lines
        assert [line for line in serving.lines if "in run_server" in line]


def test_case_67_a_lost_device_ends_the_process_with_75():
    with Serving(build="lost") as serving:
        response = httpx2.post(f"{serving.url}/v1/completions", json={"prompt": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "device_lost")
        assert serving.end(timeout_s=60) == 75
        assert serving.line(" device_lost ").endswith('fault="it is gone"')
        assert "cause=device_lost" in serving.line(" stopping ")
        assert serving.lines[-1].startswith("civetta: error[device_lost]: ")


def test_ctrl_c_ends_with_130():
    with Serving() as serving:
        assert serving.url
        assert serving.end(signal.SIGINT) == 130
        assert not [line for line in serving.lines if "Traceback" in line]


def test_health_answers_while_loading_and_ctrl_c_works():
    with Serving("--log-level", "info", build="never") as serving:
        url = serving.line("loading").split("health=")[1].split()[0]
        response = httpx2.get(url)
        assert (response.status_code, response.json()["status"]) == (503, "loading model")
        assert serving.end(signal.SIGINT) == 130


def test_a_model_that_is_not_there_is_told_before_anything_loads(tmp_path):
    with Serving("--log-level", "info", "-m", str(tmp_path / "none.gguf")) as serving:
        assert serving.end() == 1
        assert [line.partition(": ")[2].partition(" at ")[0] for line in serving.lines] == [
            "error[checkpoint_not_found]: There is nothing"
        ]


def test_a_model_that_does_not_load_ends_the_server():
    with Serving(build="missing") as serving:
        assert serving.end() == 1
        assert serving.lines[-1] == (
            "civetta: error[checkpoint_not_found]: There is no model at x.gguf."
        )


def test_a_taken_port_is_told_before_anything_loads(civetta):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = civetta("serve", "-p", port)
    assert result.status == 1
    assert result.err.startswith(
        f"civetta: error[cannot_listen]: Cannot listen on 127.0.0.1:{port}"
    )
    assert "--port" in result.err


def test_a_store_that_cannot_be_is_told_before_anything_loads(civetta, tmp_path):
    (tmp_path / "file").write_text("")
    result = civetta("serve", "-p", "0", "--store", str(tmp_path / "file"))
    assert result.status == 1
    assert result.err.splitlines()[-1].startswith("civetta: error[store_unusable]: ")
    assert "--store" in result.err


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_told(civetta, host):
    result = civetta("serve", "-p", "0", "-i", host)
    assert result.status == 1
    assert host in result.err
    assert "--host" in result.err
