"""The command table and what users see when a command cannot do its work.

A command's module is imported when the command runs, so `--help` is instant and needs no torch.
Every error is one line on stderr and an exit status: 2 for wrong usage, 1 for a failure, 130 for
Ctrl+C, 141 for a closed pipe.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import click

from civetta import __version__
from civetta.errors import CivettaError, OutputFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_WRITE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives and what the table of commands says of it."""

    module: str
    attribute: str
    summary: str


COMMANDS = {
    "chat": Entry("civetta.cli.chat", "chat", "Talk to the model in the terminal."),
    "prompt": Entry("civetta.cli.prompt", "prompt", "Print one reply and exit."),
    "serve": Entry("civetta.cli.serve", "serve", "Serve the OpenAI HTTP API."),
    "bench": Entry("civetta.cli.bench", "bench", "Measure prefill and decoding."),
    "probe": Entry("civetta.cli.probe", "probe", "Write teacher-forced logits of a text."),
    "cache": Entry("civetta.cli.cache", "cache", "List, check or empty a cache folder."),
    "diagnose": Entry("civetta.cli.diagnose", "diagnose", "Check this machine and model files."),
}


class CommandTable(click.Group):
    """The group `civetta`; imports a command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the command, or None when the table has no such name."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(entry.module), entry.attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that `args` starts with; raises UsageError naming the nearest."""
        if args[0] in COMMANDS or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        from civetta.config import nearest

        near = nearest(args[0], COMMANDS)
        cure = f"did you mean {near}?" if near else f"there are {', '.join(COMMANDS)}."
        raise UsageError(f"Unknown command {args[0]!r}: {cure}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


@click.group(
    cls=CommandTable,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", message="civetta %(version)s")
@click.pass_context
def root(context: click.Context) -> None:
    """Run Qwen3.8-Flash-Next (qwen4_exp) models on this machine."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    try:
        open_standard_streams()
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # before or after a command; within one `run` takes it
        sys.exit(EXIT_INTERRUPTED)


def open_standard_streams() -> None:
    """Give stdin, stdout and stderr a place when the process was started without.

    Else the next file that is opened takes their number. Reading finds nothing; writing results to
    a closed stdout fails, as it should, and messages to a closed stderr are lost.
    """
    for fd, name, mode, flags in (
        (0, "stdin", "r", os.O_RDONLY),
        (1, "stdout", "w", os.O_RDONLY),
        (2, "stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status; errors are told on stderr."""
    try:
        status = _invoke(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon(sys.stdout)
        return EXIT_BROKEN_PIPE
    except OSError as error:  # of the flush
        _abandon(sys.stdout)
        return _tell(OutputFailed.at("stdout", error))
    return status


def _invoke(arguments: Sequence[str]) -> int:
    try:
        with root.make_context("civetta", list(arguments)) as context:
            result = root.invoke(context)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except click.UsageError as error:
        return _tell(UsageError(_sentence(error)))
    except CivettaError as error:
        return _tell(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_FAULTS:
            return _tell_fault(error)
        _abandon(sys.stdout)
        return _tell(OutputFailed.at("stdout", error))
    except Exception as error:  # noqa: BLE001 - the root of the process: tells, then ends it
        return _tell_fault(error)


def _tell_fault(error: Exception) -> int:
    fault = f"{type(error).__name__}: {error}. This is a fault of civetta; --debug shows where."
    _say("internal", fault)
    return EXIT_INTERNAL


def _tell(error: CivettaError) -> int:
    _say(error.code, error.message)
    return error.exit_code


def _say(code: str, message: str) -> None:
    try:
        print(f"civetta: error[{code}]: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        _abandon(sys.stderr)


def _sentence(error: click.UsageError) -> str:
    """What click found wrong, as one sentence that ends with where to look."""
    path = error.ctx.command_path if error.ctx else "civetta"
    if isinstance(error, click.NoSuchOption):
        near = f": did you mean {error.possibilities[0]}?" if error.possibilities else "."
        text = f"Unknown option {error.option_name}{near}"
    else:
        text = error.format_message()
    text = text if text.endswith((".", "?", "!")) else f"{text}."
    return f"{text} See {path} --help."


def _abandon(stream: TextIO) -> None:
    """Point a stream at nothing, so that the interpreter's own flush at exit does not fail."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
