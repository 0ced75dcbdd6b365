"""Typed server-sent events, as the Responses and the Messages API have them."""

from __future__ import annotations

import json
from typing import Any


def typed_events(text: str) -> list[dict[str, Any]]:
    """Payloads of a stream; each event is named by its payload's type. Comments are left out."""
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        events.append(payload)
    return events


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client that trusts nothing but deltas and `added` events builds of a response.

    Checks on the way that numbers have no gaps, and that every `done` event repeats the deltas.
    """
    assert [item["sequence_number"] for item in events] == list(range(len(events)))
    assert [item["type"] for item in events[:2]] == ["response.created", "response.in_progress"]
    output: list[dict[str, Any]] = []
    for item in events[2:-1]:
        _apply(output, item)
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert [_bare(item) for item in last["output"]] == [_bare(item) for item in output]
    return {**last, "output": output}


def _apply(output: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item["type"].removeprefix("response.")
    if kind == "output_item.added":
        assert item["output_index"] == len(output)
        assert item["item"]["status"] == "in_progress"
        output.append(item["item"])
        return
    open_item = output[-1]
    assert item["output_index"] == len(output) - 1
    if kind == "output_item.done":
        assert item["item"]["status"] in ("completed", "incomplete")
        assert _bare(item["item"]) == _bare(open_item)
        return
    assert item["item_id"] == open_item["id"]
    noun, _, verb = kind.rpartition(".")
    _STEPS[verb](open_item, noun, item)


def _begin(open_item: dict[str, Any], noun: str, item: dict[str, Any]) -> None:
    name, index = _PARTS[noun]
    parts = open_item.setdefault(name, [])
    assert item[index] == len(parts)
    parts.append(item["part"])


def _grow(open_item: dict[str, Any], noun: str, item: dict[str, Any]) -> None:
    assert item["delta"]
    if noun == "function_call_arguments":
        open_item["arguments"] += item["delta"]
        return
    name, index = _PARTS[noun]
    part = open_item[name][item[index]]
    part["text"] += item["delta"]
    if noun == "output_text":
        part["logprobs"] = part["logprobs"] + item["logprobs"]


def _end(open_item: dict[str, Any], noun: str, item: dict[str, Any]) -> None:
    if noun == "function_call_arguments":
        assert item["arguments"] == open_item["arguments"]
        assert item["name"] == open_item["name"]
        return
    name, index = _PARTS[noun]
    part = open_item[name][item[index]]
    assert item.get("part", part) == part
    assert item.get("text", part["text"]) == part["text"]


_STEPS = {"added": _begin, "delta": _grow, "done": _end}
_PARTS = {
    "content_part": ("content", "content_index"),
    "output_text": ("content", "content_index"),
    "reasoning_text": ("content", "content_index"),
    "reasoning_summary_part": ("summary", "summary_index"),
    "reasoning_summary_text": ("summary", "summary_index"),
}


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    late = ("status", "encrypted_content")  # told with the whole item, not in steps
    return {key: value for key, value in item.items() if key not in late}


def told(output: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Output items without ids: what they say, in order."""
    said: list[tuple[str, ...]] = []
    for item in output:
        match item["type"]:
            case "reasoning":
                parts = item["summary"] or item["content"]
                said.append(("reasoning", "".join(part["text"] for part in parts)))
            case "message":
                said.append(("message", "".join(part["text"] for part in item["content"])))
            case "function_call":
                said.append(("function_call", item["name"], item["arguments"]))
    return said


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client that trusts nothing but the events builds of a message; pings are left out."""
    events = [item for item in events if item["type"] != "ping"]
    assert [item["type"] for item in (events[0], *events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    message = events[0]["message"]
    open_index: int | None = None
    for item in events[1:-2]:
        content = message["content"]
        match item["type"]:
            case "content_block_start":
                assert open_index is None
                assert item["index"] == len(content)
                open_index = item["index"]
                content.append(item["content_block"])
            case "content_block_delta":
                assert item["index"] == open_index
                _apply_delta(content[open_index], item["delta"])
            case "content_block_stop":
                assert item["index"] == open_index
                open_index = None
            case kind:
                raise AssertionError(f"an event of no known type: {kind}")
    assert open_index is None
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    took = {key: events[-2][key] for key in ("usage", "timings")}
    return {**message, **events[-2]["delta"], **took}


def _apply_delta(block: dict[str, Any], delta: dict[str, Any]) -> None:
    name, key = {
        "text_delta": ("text", "text"),
        "thinking_delta": ("thinking", "thinking"),
        "signature_delta": ("signature", "signature"),
        "input_json_delta": ("input", "partial_json"),
    }[delta["type"]]
    block[name] = (block[name] or "") + delta[key]
