"""The conversation behind `civetta chat` and its /commands; no terminal and no engine here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from civetta.chat.message import Conversation, Message, TextPart, text_message
from civetta.cli.chat_media import PendingMedia, restored, saved
from civetta.config import nearest
from civetta.errors import CivettaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.chat.message import Part
    from civetta.chat.template import TemplateOptions
    from civetta.engine.client import ReplyEnd

FORMAT = "civetta-chat-1"
HELP = """\
/help             show this list
/think MODE       on, off, low, medium or xhigh
/image FILE       show the model a picture with the next message
/video PATH       likewise a video, or a folder of frames at two a second
/system TEXT      set the system message; off removes it, no text shows it
/retry            ask the last question again
/clear            forget the conversation (the system message stays)
/save FILE        write the conversation to FILE
/load FILE        continue the conversation in FILE
/stats            figures of the last reply
/quit             leave (so does Ctrl+D); Ctrl+C stops a reply"""


class CommandFault(CivettaError):
    """A /command that cannot be carried out; the conversation goes on."""

    code = "command"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a line of input leads to: a note to show, a question to answer, the end."""

    note: str = ""
    ask: bool = False
    leave: bool = False


@dataclass(slots=True, kw_only=True)
class ChatSession:
    """Messages so far and how to ask for the next one."""

    template: TemplateOptions
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    media: PendingMedia = field(default_factory=PendingMedia)
    last: ReplyEnd | None = None
    figures: str = ""

    def conversation(self) -> Conversation:
        """The system message, if any, and what was said."""
        head = [] if self.system is None else [text_message("system", self.system)]
        return Conversation(messages=tuple(head + self.messages))

    def take(self, line: str) -> Outcome:
        """Handle one line of input. Raises CommandFault for a command that cannot be carried out.

        A line that starts with a slash is a command; two slashes begin a text with one.
        """
        if not line.startswith("/") or line.startswith("//"):
            text = line.removeprefix("/") if line.startswith("//") else line
            if not text.strip():
                return Outcome()
            parts: tuple[Part, ...] = (*self.media.take(), TextPart(text=text))
            self.messages.append(Message(role="user", parts=parts))
            return Outcome(ask=True)
        name, _, argument = line[1:].partition(" ")
        command = self._commands().get(name)
        if command is None:
            near = nearest(name, self._commands())
            cure = f"did you mean /{near}?" if near else "/help lists the commands."
            raise CommandFault(f"Unknown command /{name}: {cure}")
        return command(argument.strip())

    def answered(self, end: ReplyEnd, figures: str) -> None:
        """Add the reply, or what there is of a stopped one, to the conversation."""
        self.last, self.figures = end, figures
        self.messages.append(
            text_message("assistant", end.content, reasoning=end.reasoning or None)
        )

    def failed(self) -> None:
        """Take the question back that could not be answered."""
        assert self.messages[-1].role == "user", "a question was asked"
        self.messages.pop()

    def _commands(self) -> dict[str, Callable[[str], Outcome]]:
        return {
            "help": lambda _: Outcome(note=HELP),
            "quit": lambda _: Outcome(leave=True),
            "exit": lambda _: Outcome(leave=True),
            "clear": self._clear,
            "system": self._system,
            "image": self._image,
            "video": self._video,
            "think": self._think,
            "retry": self._retry,
            "stats": lambda _: Outcome(note=self.figures or "There is no reply yet."),
            "save": self._save,
            "load": self._load,
        }

    def _clear(self, _: str) -> Outcome:
        self.messages.clear()
        self.media.restart()
        return Outcome(note="The conversation is forgotten.")

    def _image(self, name: str) -> Outcome:
        if not name:
            raise CommandFault("/image takes the name of a file.")
        self.media.add_image(name)
        return _waiting("picture", len(self.media.images))

    def _video(self, name: str) -> Outcome:
        if not name:
            raise CommandFault("/video takes the name of a file, or of a folder of frames.")
        self.media.add_video(name)
        return _waiting("video", len(self.media.videos))

    def _system(self, text: str) -> Outcome:
        if text == "off":
            self.system = None
            return Outcome(note="There is no system message now.")
        if text:
            self.system = text
            return Outcome(note="The system message is set.")
        return Outcome(note=self.system or "There is no system message.")

    def _think(self, mode: str) -> Outcome:
        switches = {"on": True, "off": False}
        if mode in switches:
            self.template = replace(
                self.template, enable_thinking=switches[mode], reasoning_effort="auto"
            )
        elif mode in ("low", "medium", "xhigh"):
            self.template = replace(self.template, enable_thinking=True, reasoning_effort=mode)
        else:
            raise CommandFault("/think takes on, off, low, medium or xhigh.")
        return Outcome(note=f"Thinking: {mode}.")

    def _retry(self, _: str) -> Outcome:
        asked = [index for index, item in enumerate(self.messages) if item.role == "user"]
        if not asked:
            raise CommandFault("There is no question to ask again.")
        del self.messages[asked[-1] + 1 :]
        return Outcome(ask=True)

    def _save(self, name: str) -> Outcome:
        path = _path(name, "save")
        document = {
            "format": FORMAT,
            "system": self.system,
            "messages": [
                {"role": item.role, "content": item.text, "reasoning": item.reasoning} | saved(item)
                for item in self.messages
            ],
        }
        written = path.with_name(path.name + ".tmp")
        try:
            written.write_text(json.dumps(document, ensure_ascii=False, indent=1), "utf-8")
            written.replace(path)
        except OSError as error:
            raise CommandFault(f"Cannot write {path}: {error.strerror}.") from error
        return Outcome(note=f"{len(self.messages)} messages are in {path}.")

    def _load(self, name: str) -> Outcome:
        path = _path(name, "load")
        try:
            self.system, self.messages = _read(path)
            self.media.restart(*_counts(self.messages))
        except OSError as error:
            raise CommandFault(f"Cannot read {path}: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CommandFault(f"{path} is not a conversation that /save wrote.") from error
        return Outcome(note=f"{len(self.messages)} messages are loaded.")


def _waiting(thing: str, count: int) -> Outcome:
    goes = f"{thing} goes" if count == 1 else f"{thing}s go"
    return Outcome(note=f"{count} {goes} with the next message.")


def _path(name: str, command: str) -> Path:
    if not name:
        raise CommandFault(f"/{command} takes the name of a file.")
    return Path(name).expanduser()


def _read(path: Path) -> tuple[str | None, list[Message]]:
    """The system message and the messages in a saved file; ValueError and others when it is none."""
    document = json.loads(path.read_text("utf-8"))
    system = document["system"]
    if document["format"] != FORMAT or not isinstance(system, str | None):
        raise ValueError
    messages: list[Message] = []
    for item in document["messages"]:
        messages.append(_message(item, *_counts(messages)))
    return system, messages


def _counts(messages: list[Message]) -> tuple[int, int]:
    """Pictures and videos of the messages."""
    return sum(len(item.images) for item in messages), sum(len(item.videos) for item in messages)


def _message(item: Any, images_before: int, videos_before: int) -> Message:
    role, content, reasoning = item["role"], item["content"], item["reasoning"]
    if role not in ("user", "assistant") or not isinstance(content, str):
        raise ValueError
    if not isinstance(reasoning, str | None):
        raise TypeError
    media = restored(item, images_before + 1, videos_before + 1)
    return Message(role=role, parts=(*media, TextPart(text=content)), reasoning=reasoning)
