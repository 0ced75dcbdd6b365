"""A reply as output items, and the events that tell of each step; both come from one place.

A thought, every stretch of text, and every call is an item. Items of the buffered reply are those
that the events of the stream have built up, because there is only one way to build them.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from civetta.api.logprobs import chat_entry
from civetta.chat.reply import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from civetta.api.logprobs import TokenBytes
    from civetta.api.seal import ThoughtSeal
    from civetta.engine.client import ReplyDelta

Event = dict[str, Any]
"""A server-sent event without its sequence number."""


class OutputItems:
    """Builds `items` from the deltas of a reply.

    summary: the thought is shown as a summary, else as its own text. namespaces: where a function
    is in one. tokens: spells log-probabilities; None leaves them out. seal: thoughts have
    `encrypted_content` of it; None leaves that out.
    """

    def __init__(
        self,
        *,
        summary: bool,
        namespaces: Mapping[str, str],
        tokens: TokenBytes | None,
        seal: ThoughtSeal | None = None,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._summary = summary
        self._namespaces = namespaces
        self._tokens = tokens
        self._seal = seal
        self._entries: list[dict[str, Any]] = []  # log-probabilities of text that is held back
        self._open = ""  # the kind of the last item, while it grows
        self._grown: list[str] = []  # its text, which the item has once it is closed

    def add(self, reply: ReplyDelta) -> Iterator[Event]:
        """The events of what came. They have to be taken for the items to grow."""
        if self._tokens is not None and reply.logprob is not None and not reply.in_reasoning:
            self._entries.append(chat_entry(self._tokens, reply.logprob))
        for delta in reply.deltas:
            match delta:
                case ReasoningDelta():
                    yield from self._thought(delta.text)
                case ContentDelta():
                    yield from self._text(delta.text)
                case ToolCallStart():
                    yield from self._start_call(delta)
                case ToolArgumentsDelta():
                    yield self._arguments(delta.json_fragment)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The events that end the item which is growing, if one is."""
        kind, self._open = self._open, ""
        text, self._grown = "".join(self._grown), []
        if not kind:
            return
        item = self.items[-1]
        item["status"] = status
        yield from getattr(self, f"_close_{kind}")(item, text)
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": item,
        }

    def _start(self, kind: str, item: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._open = kind
        self.items.append(item)
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": _copy(item),
        }

    def _at(self, kind: str, **more: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **more}

    # ---- thought -------------------------------------------------------------------------------

    def _thought(self, text: str) -> Iterator[Event]:
        if self._open != "reasoning":
            item: dict[str, Any] = {"id": _id("rs"), "type": "reasoning", "summary": []}
            item["status"] = "in_progress"
            yield from self._start("reasoning", item)
            if self._summary:
                item["summary"] = [{"type": "summary_text", "text": ""}]
                yield self._at(
                    "reasoning_summary_part.added",
                    summary_index=0,
                    part=dict(item["summary"][0]),
                )
            else:
                item["content"] = [{"type": "reasoning_text", "text": ""}]
                yield self._at("content_part.added", content_index=0, part=dict(item["content"][0]))
        self._grown.append(text)
        if self._summary:
            yield self._at("reasoning_summary_text.delta", summary_index=0, delta=text)
        else:
            yield self._at("reasoning_text.delta", content_index=0, delta=text)

    def _close_reasoning(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        part = item["summary" if self._summary else "content"][0]
        part["text"] = text
        if self._seal is not None:
            item["encrypted_content"] = self._seal.seal(text)
        if self._summary:
            yield self._at("reasoning_summary_text.done", summary_index=0, text=text)
            yield self._at("reasoning_summary_part.done", summary_index=0, part=part)
        else:
            yield self._at("reasoning_text.done", content_index=0, text=text)
            yield self._at("content_part.done", content_index=0, part=part)

    # ---- text ----------------------------------------------------------------------------------

    def _text(self, text: str) -> Iterator[Event]:
        if self._open != "message":
            item: dict[str, Any] = {"id": _id("msg"), "type": "message", "role": "assistant"}
            item |= {"status": "in_progress", "content": []}
            yield from self._start("message", item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._at("content_part.added", content_index=0, part=_copy(part))
        part = self.items[-1]["content"][0]
        entries, self._entries = self._entries, []
        part["logprobs"] += entries
        self._grown.append(text)
        yield self._at("output_text.delta", content_index=0, delta=text, logprobs=entries)

    def _close_message(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        part = item["content"][0]
        part["text"] = text
        yield self._at("output_text.done", content_index=0, text=text, logprobs=part["logprobs"])
        yield self._at("content_part.done", content_index=0, part=part)

    # ---- calls ---------------------------------------------------------------------------------

    def _start_call(self, call: ToolCallStart) -> Iterator[Event]:
        self._entries = []  # they spelled the call
        item = {"id": _id("fc"), "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        if call.name in self._namespaces:
            item["namespace"] = self._namespaces[call.name]
        yield from self._start("call", item)

    def _arguments(self, fragment: str) -> Event:
        self._grown.append(fragment)
        return self._at("function_call_arguments.delta", delta=fragment)

    def _close_call(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        item["arguments"] = text
        yield self._at(
            "function_call_arguments.done", name=item["name"], arguments=item["arguments"]
        )


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is now; its lists grow later."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}
