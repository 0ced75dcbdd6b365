"""LiteLLM and `llm` ask a running server in each API, streamed and whole; prints and saves a table.

Needs an environment of its own (pip install litellm llm), since both bring many packages:

    civetta serve -p 8080 --store /tmp/store &
    python benchmarks/clients.py --base-url http://127.0.0.1:8080 --save clients.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import litellm

if TYPE_CHECKING:
    from collections.abc import Callable

ASKED, ANSWER = "What is 17+25?", "42"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Ulm", "Bonn"]}},
            "required": ["city"],
        },
    },
}
FORCED = {"type": "function", "function": {"name": "weather"}}


class Checks:
    """Runs checks and keeps what they said."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def run(self, client: str, what: str, check: Callable[[], object]) -> None:
        """One row: passed when `check` returns what it should without raising."""
        began_s = time.monotonic()
        try:
            said, passed = str(check()), True
        except Exception as error:  # noqa: BLE001 - a check may fail in any way, and the table says how
            said, passed = f"{type(error).__name__}: {error}", False
        seconds = round(time.monotonic() - began_s, 2)
        self.rows.append(
            {"client": client, "what": what, "passed": passed, "said": said[:200], "s": seconds}
        )
        print(f"{'ok  ' if passed else 'FAIL'} {client:8} {what:40} {seconds:6.2f} s  {said[:80]}")


def expect(said: str, wanted: str = ANSWER) -> str:
    """`said` itself; raises unless it has what is wanted."""
    if wanted not in said:
        raise ValueError(f"{wanted!r} is not in {said!r}")
    return said


def litellm_checks(checks: Checks, url: str, model: str) -> None:
    """Chat completions, Messages and Responses through LiteLLM's library."""
    messages = [{"role": "user", "content": ASKED}]
    dialects = {
        "chat": {"model": f"openai/{model}", "api_base": f"{url}/v1"},
        "messages": {"model": f"anthropic/{model}", "api_base": url},
    }
    for name, place in dialects.items():
        common: dict[str, Any] = {**place, "api_key": "none", "messages": messages}
        common |= {"temperature": 0, "max_tokens": 600}

        def whole(common: dict[str, Any] = common) -> str:
            return expect(litellm.completion(**common).choices[0].message.content)

        def streamed(common: dict[str, Any] = common) -> str:
            chunks = litellm.completion(stream=True, **common)
            return expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks))

        def called(common: dict[str, Any] = common) -> str:
            done = litellm.completion(tools=[TOOL], tool_choice=FORCED, **common)
            (call,) = done.choices[0].message.tool_calls
            return f"{call.function.name}({json.loads(call.function.arguments)})"

        checks.run("litellm", f"{name}, whole", whole)
        checks.run("litellm", f"{name}, streamed", streamed)
        checks.run("litellm", f"{name}, forced tool call", called)
    place = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    place |= {"temperature": 0, "max_output_tokens": 600}

    def response() -> str:
        return expect(litellm.responses(input=ASKED, **place).output_text)

    def response_events() -> str:
        events = list(litellm.responses(input=ASKED, stream=True, **place))
        return expect(events[-1].response.output_text)

    def response_chain() -> str:
        first = litellm.responses(input=ASKED, **place)
        second = litellm.responses(input="What is 60-14?", previous_response_id=first.id, **place)
        return expect(second.output_text, "46")

    checks.run("litellm", "responses, whole", response)
    checks.run("litellm", "responses, streamed", response_events)
    checks.run("litellm", "responses, previous_response_id", response_chain)


def llm_checks(checks: Checks, url: str, model: str) -> None:
    """The `llm` command, with its two ways to ask an OpenAI-compatible server."""
    with tempfile.TemporaryDirectory() as folder:
        entries = "".join(
            f"- model_id: {name}\n  model_name: {model}\n  api_base: {url}/v1\n"
            f"  supports_tools: true\n  supports_schema: true\n{more}"
            for name, more in (("chat", ""), ("responses", "  responses: true\n"))
        )
        Path(folder, "extra-openai-models.yaml").write_text(entries, encoding="utf-8")
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        llm = str(Path(sys.executable).with_name("llm"))

        def ask(*arguments: str) -> str:
            command = [llm, "prompt", "-o", "temperature", "0", *arguments]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr.strip())
            return done.stdout.strip()

        schema = "city: a city, days int"
        for name in ("chat", "responses"):
            checks.run(
                "llm", f"{name}, whole", lambda n=name: expect(ask("-m", n, "--no-stream", ASKED))
            )
            checks.run("llm", f"{name}, streamed", lambda n=name: expect(ask("-m", n, ASKED)))
            checks.run(
                "llm",
                f"{name}, schema",
                lambda n=name: json.loads(ask("-m", n, "--schema", schema, "Ulm for 3 days?")),
            )


def main() -> int:
    """Run all checks; 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="address of the server, without /v1")
    parser.add_argument("--save", type=Path, help="where the rows go, as JSON")
    arguments = parser.parse_args()
    with urlopen(f"{arguments.base_url}/v1/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    checks = Checks()
    litellm_checks(checks, arguments.base_url, model)
    llm_checks(checks, arguments.base_url, model)
    versions = {name: version(name) for name in ("litellm", "llm", "openai")}
    print(" ".join(f"{name} {number}" for name, number in versions.items()))
    if arguments.save is not None:
        saved = {"model": model, "versions": versions, "rows": checks.rows}
        arguments.save.write_text(json.dumps(saved, indent=1), encoding="utf-8")
    return int(not all(row["passed"] for row in checks.rows))


if __name__ == "__main__":
    raise SystemExit(main())
