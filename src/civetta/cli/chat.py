"""`civetta chat`: a conversation in the terminal, or over a pipe line by line."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from rich.console import Console

from civetta.chat.reply import ContentDelta, ReasoningDelta
from civetta.cli import engine_setup
from civetta.cli.asking import (
    TracedEngine,
    asking_options,
    cut_short_note,
    figures,
    printable,
    reply_options,
    trace_line,
    with_short_forms,
)
from civetta.cli.chat_media import PendingMedia
from civetta.cli.chat_session import ChatSession
from civetta.cli.options import level_of, settings_command
from civetta.config import read_terminal
from civetta.engine.client import ChatClient, ReplyDelta, ReplyEnd
from civetta.errors import CivettaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from civetta.chat.reply import Delta
    from civetta.engine.client import ReplyOptions, ReplyStream
    from civetta.options import Settings

EXIT_INTERRUPTED = 130
_PROMPT = "> "
_MORE = ". "


@click.command(short_help="Talk to the model in the terminal.")
@click.option("--system", metavar="TEXT", help="System message to put first.")
@click.option(
    "--image", "images", metavar="FILE", multiple=True, help="Picture for the first message."
)
@click.option(
    "--video",
    "videos",
    metavar="PATH",
    multiple=True,
    help="Video for the first message, or a folder of frames at two a second.",
)
@asking_options
@settings_command(
    "model",
    "vision",
    "sampling",
    "reasoning",
    "engine.prefill_batch",
    "cache",
    "drafting",
    defaults={"sessions": 1},
)
def chat(
    settings: Settings,
    system: str | None,
    images: tuple[str, ...],
    videos: tuple[str, ...],
    add_vision_id: bool,
    on_cpu: bool,
    prompt_lookup: bool,
) -> int:
    """Talk to the model; /help lists the commands, Ctrl+C stops a reply, Ctrl+D leaves.

    Without a terminal, each line of stdin is one message and the replies go to stdout.
    """
    settings = with_short_forms(settings, on_cpu=on_cpu, prompt_lookup=prompt_lookup)
    started_s = time.monotonic()
    media = PendingMedia()
    for name in images:
        media.add_image(name)
    for name in videos:
        media.add_video(name)
    engine = TracedEngine(engine_setup.build_engine(settings))
    try:
        screen = Screen()
        info = engine.info
        screen.greet(
            f"{info.model_id}, {info.context_tokens} tokens of context, loaded in"
            f" {time.monotonic() - started_s:.1f} s. /help lists the commands."
        )
        options = reply_options(settings, add_vision_id=add_vision_id)
        session = ChatSession(template=options.template, system=system, media=media)
        return Talk(screen, session, engine, options, trace=level_of(settings) > 0).run()
    finally:
        engine.close()


class Screen:
    """Where lines come from and text goes to; plain when it is no terminal or a dumb one."""

    def __init__(self) -> None:
        facts = read_terminal()
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._fancy = sys.stdout.isatty() and not facts.dumb and not facts.no_color
        self._console = Console(
            file=sys.stdout, no_color=not self._fancy, highlight=False, emoji=False, soft_wrap=True
        )
        self._section = ""
        self._ends_line = True
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() editing and history

    def greet(self, text: str) -> None:
        """Say what was loaded, to people only."""
        if self.interactive:
            self.note(text)

    def read(self) -> str | None:
        """The next message, joined where a line ends in a backslash; None at the end of input."""
        lines: list[str] = []
        while True:
            try:
                line = input((_MORE if lines else _PROMPT) if self.interactive else "")
            except EOFError:
                return "\n".join(lines) if lines else None
            except UnicodeDecodeError as error:
                raise UsageError(f"The input is not UTF-8 text: {error.reason}.") from error
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def note(self, text: str) -> None:
        """Show something that is not part of a reply; on stderr when stdout is read by a program."""
        print(text, file=sys.stdout if self.interactive else sys.stderr, flush=True)

    def show(self, delta: Delta) -> None:
        """Show a piece of the reply: thoughts dimmed, or under a heading where nothing is dim."""
        if isinstance(delta, ReasoningDelta):
            self._open("thinking")
            self._write(delta.text, dim=True)
        elif isinstance(delta, ContentDelta):
            self._open("answer")
            self._write(delta.text, dim=False)

    def end_reply(self) -> None:
        """Go to a new line."""
        if not self._ends_line:
            self._write("\n", dim=False)
        self._section, self._ends_line = "", True

    def _open(self, section: str) -> None:
        before, self._section = self._section, section
        if before == section:
            return
        if before:
            self._write("\n\n" if not self._ends_line else "\n", dim=False)
        if not self._fancy and (before or section == "thinking"):
            self._write(f"[{section}]\n", dim=False)

    def _write(self, text: str, *, dim: bool) -> None:
        if self._fancy:
            style = "dim" if dim else ""
            self._console.print(printable(text, sys.stdout), end="", style=style, markup=False)
        else:
            sys.stdout.write(printable(text, sys.stdout))
        sys.stdout.flush()
        if text:
            self._ends_line = text.endswith("\n")


class Talk:
    """Reads, asks, shows, until the input ends."""

    def __init__(
        self,
        screen: Screen,
        session: ChatSession,
        engine: TracedEngine,
        options: ReplyOptions,
        *,
        trace: bool,
    ) -> None:
        self._screen, self._session, self._engine = screen, session, engine
        self._client, self._options, self._trace = ChatClient(engine), options, trace

    def run(self) -> int:
        """Talk; returns 0, or without a terminal the status of the last error."""
        status = 0
        interrupted = False
        while True:
            try:
                line = self._screen.read()
            except KeyboardInterrupt:
                if interrupted or not self._screen.interactive:
                    return EXIT_INTERRUPTED
                interrupted = True
                self._screen.note("\nCtrl+C again leaves, so does /quit.")
                continue
            interrupted = False
            if line is None:
                return 0 if self._screen.interactive else status
            try:
                outcome = self._session.take(line)
                if outcome.leave:
                    return 0 if self._screen.interactive else status
                if outcome.note:
                    self._screen.note(outcome.note)
                if outcome.ask:
                    self._answer()
            except CivettaError as error:
                status = error.exit_code
                self._screen.note(f"civetta: error[{error.code}]: {error.message}")

    def _answer(self) -> None:
        options = replace(self._options, template=self._session.template)
        try:
            end = self._reply(options)
        except CivettaError:
            self._screen.end_reply()
            self._session.failed()
            raise
        self._screen.end_reply()
        self._session.answered(end, figures(end))
        note = cut_short_note(end, options.max_tokens)
        if note is not None:
            self._screen.note(note)
        if self._trace:
            self._screen.note(figures(end))
            self._screen.note(trace_line(self._engine.token_ids))

    def _reply(self, options: ReplyOptions) -> ReplyEnd:
        stream = self._client.generate_sync(self._session.conversation(), options)
        with cancel_on_interrupt(stream):
            for event in stream:
                if isinstance(event, ReplyDelta):
                    for delta in event.deltas:
                        self._screen.show(delta)
                elif isinstance(event, ReplyEnd):
                    return event
        raise AssertionError("a stream ends with ReplyEnd or an error")


@contextlib.contextmanager
def cancel_on_interrupt(stream: ReplyStream) -> Iterator[None]:
    """Let the first Ctrl+C stop the reply, which then ends in order; the second one is raised."""
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        stream.cancel()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
