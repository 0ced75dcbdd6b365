"""`civetta prompt`: one reply on stdout, everything else on stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import msgspec

from civetta.chat.image_source import file_part
from civetta.chat.message import Conversation, Message, TextPart, text_message
from civetta.chat.reply import ContentDelta, ReasoningDelta
from civetta.chat.video_source import file_video
from civetta.cli import engine_setup
from civetta.cli.asking import (
    TracedEngine,
    asking_options,
    cut_short_note,
    figures,
    ids_sha256,
    printable,
    reply_options,
    trace_line,
    with_short_forms,
)
from civetta.cli.inputs import read_text
from civetta.cli.options import flags_used, level_of, settings_command
from civetta.engine.client import ChatClient, ReplyDelta, ReplyEnd
from civetta.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.chat.message import ImagePart, VideoPart
    from civetta.engine.client import PreparedReply, ReplyOptions, ReplyStream
    from civetta.options import Settings

STDIN = "-"
_HOW = "give one prompt: as text, with -p TEXT, or with -f FILE (- reads stdin)"


@click.command(short_help="Print one reply and exit.")
@click.argument("text", required=False, metavar="[TEXT]")
@click.option("-p", "--prompt", "flag_text", metavar="TEXT", help="The prompt.")
@click.option("-f", "--file", "file", metavar="FILE", help="Read the prompt from FILE, - is stdin.")
@click.option("--system", metavar="TEXT", help="System message to put first.")
@click.option(
    "--image", "images", metavar="FILE", multiple=True, help="Picture to ask about; repeatable."
)
@click.option(
    "--video",
    "videos",
    metavar="PATH",
    multiple=True,
    help="Video to ask about, or a folder of frames at two a second; repeatable.",
)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without chat template.")
@click.option(
    "--no-display-prompt", is_flag=True, help="With --raw: print what follows the prompt only."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when it is done.")
@asking_options
@settings_command(
    "model",
    "vision",
    "sampling",
    "reasoning.think",
    "reasoning.reasoning_effort",
    "reasoning.thinking_budget",
    "engine.prefill_batch",
    "cache",
    "drafting",
    defaults={"max_tokens": 128, "sessions": 1},
)
def prompt(
    settings: Settings,
    text: str | None,
    flag_text: str | None,
    file: str | None,
    system: str | None,
    images: tuple[str, ...],
    videos: tuple[str, ...],
    raw: bool,
    no_display_prompt: bool,
    as_json: bool,
    add_vision_id: bool,
    on_cpu: bool,
    prompt_lookup: bool,
) -> int:
    """Print the reply to one prompt on stdout; reasoning and figures go to stderr.

    The prompt is TEXT, or comes from -p or -f; TEXT - reads it from stdin.
    """
    settings = with_short_forms(settings, on_cpu=on_cpu, prompt_lookup=prompt_lookup)
    for flag, given in (
        ("--system", system is not None),
        ("--add-vision-id", add_vision_id),
        ("--image", bool(images)),
        ("--video", bool(videos)),
    ):
        if raw and given:
            _refuse_with_raw(flag)
    _check_thinking(settings, raw=raw)
    if no_display_prompt and (as_json or not raw):
        raise UsageError(
            "--no-display-prompt leaves out the prompt that --raw alone prints, and --json never"
            " has: drop it."
        )
    media: list[ImagePart | VideoPart] = [
        *(file_part(Path(name), index=i) for i, name in enumerate(images, 1)),
        *(file_video(Path(name), index=i) for i, name in enumerate(videos, 1)),
    ]
    question = _question(text, flag_text, file)
    started_s = time.monotonic()
    engine = TracedEngine(engine_setup.build_engine(settings))
    try:
        load_s = time.monotonic() - started_s
        client = ChatClient(engine)
        prepared = _prepare(
            client,
            reply_options(settings, add_vision_id=add_vision_id),
            question,
            system,
            media,
            raw=raw,
        )
        quiet = as_json or (not sys.stderr.isatty() and not level_of(settings))
        if raw and not as_json and not no_display_prompt:
            _write(question)
        end = _print_reply(client.submit(prepared), as_json=as_json, hide_reasoning=quiet)
        if as_json:
            _print_json(end, engine, load_s)
        _print_figures(settings, end, engine, load_s)
    finally:
        engine.close()
    return 0


def _refuse_with_raw(flag: str) -> NoReturn:
    raise UsageError(f"{flag} needs the chat template, which --raw leaves out: drop one.")


def _check_thinking(settings: Settings, *, raw: bool) -> None:
    """Raises UsageError for flags about thoughts that would change nothing.

    What a configuration file or the environment says is for all commands, and is passed over here.
    """
    used = flags_used("reasoning_effort", "thinking_budget")
    if raw and used:
        _refuse_with_raw(used[0])
    if "--thinking-budget" in used and settings.reasoning.think == "off":
        raise UsageError("--thinking-budget needs thinking, but --think is off: drop one of them.")


def _question(text: str | None, flag_text: str | None, file: str | None) -> str:
    """The one prompt. Raises UsageError for none, several, or a file that cannot be read."""
    given = [item for item in (text, flag_text, file) if item is not None]
    if len(given) != 1:
        what = "There is no prompt" if not given else "There is more than one prompt"
        raise UsageError(f"{what}: {_HOW}.")
    if flag_text is not None:
        question = flag_text
    elif file is None and text != STDIN:
        question = text or ""
    else:
        question = _read(file or STDIN)
    if not question:
        raise UsageError(f"The prompt is empty: {_HOW}.")
    return question


def _read(path: str) -> str:
    try:
        if path == STDIN:
            return read_text(sys.stdin.buffer, "stdin")
        with Path(path).open("rb") as file:
            return read_text(file, path)
    except OSError as error:
        raise UsageError(f"Cannot read the prompt from {path}: {error.strerror}.") from error


def _prepare(
    client: ChatClient,
    options: ReplyOptions,
    question: str,
    system: str | None,
    media: Sequence[ImagePart | VideoPart],
    *,
    raw: bool,
) -> PreparedReply:
    if raw:
        return client.prepare_text(question, options)
    messages = [Message(role="user", parts=(*media, TextPart(text=question)))]
    if system is not None:
        messages.insert(0, text_message("system", system))
    return client.prepare(Conversation(messages=tuple(messages)), options)


def _print_reply(stream: ReplyStream, *, as_json: bool, hide_reasoning: bool) -> ReplyEnd:
    """Print content as it comes (nothing with `as_json`) and return the whole reply."""
    last = ""
    thinking = False
    for event in stream:
        if isinstance(event, ReplyEnd):
            if not as_json and not last.endswith("\n"):
                _write("\n")
            return event
        if not isinstance(event, ReplyDelta) or as_json:
            continue
        for delta in event.deltas:
            if isinstance(delta, ReasoningDelta) and not hide_reasoning:
                sys.stderr.write(printable(delta.text, sys.stderr))
                sys.stderr.flush()
                thinking = True
            elif isinstance(delta, ContentDelta):
                if thinking:
                    sys.stderr.write("\n\n")
                    thinking = False
                _write(delta.text)
                last = delta.text
    raise AssertionError("a stream ends with ReplyEnd or an error")


def _write(text: str) -> None:
    sys.stdout.write(printable(text, sys.stdout))
    sys.stdout.flush()


def _print_json(end: ReplyEnd, engine: TracedEngine, load_s: float) -> None:
    usage = end.usage
    report = {
        "model": engine.info.model_id,
        "content": end.content,
        "reasoning": end.reasoning,
        "finish_reason": end.finish_reason.value,
        "seed": end.seed,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "draft_tokens": usage.draft_tokens,
        "draft_tokens_accepted": usage.draft_tokens_accepted,
        "draft_depths": usage.draft_depths,
        "token_sha256": ids_sha256(engine.token_ids),
        "load_s": round(load_s, 3),
        "prefill_s": round(usage.prefill_s, 6),
        "decode_s": round(usage.decode_s, 6),
    }
    _write(msgspec.json.encode(report).decode() + "\n")


def _print_figures(settings: Settings, end: ReplyEnd, engine: TracedEngine, load_s: float) -> None:
    max_tokens = reply_options(settings).max_tokens
    lines = [f"loaded {engine.info.model_id} in {load_s:.2f} s, {figures(end)}"]
    if level_of(settings):
        lines.append(trace_line(engine.token_ids))
    note = cut_short_note(end, max_tokens)
    if note is not None:
        lines.append(note)
    for line in lines:
        print(line, file=sys.stderr, flush=True)
