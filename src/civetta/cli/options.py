"""Command-line options made from `civetta.options`: no flag is written down a second time."""

from __future__ import annotations

import functools
import shlex
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from civetta import __version__
from civetta.config import load_settings, parse_value
from civetta.errors import UsageError
from civetta.log import set_up_logging
from civetta.options import Settings, all_settings, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from civetta.setting import Setting


def settings_command(
    *topics: str,
    defaults: Mapping[str, object] | None = None,
    log_level: str = "warn",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of `topics`, `--config` and logging; -vv shows tracebacks.

    A topic is one of `options.TOPICS`, or a single setting of it as `topic.name`.

    The function is called with the resolved `Settings` first. `defaults` are the command's own,
    weaker than environment and file; `log_level` is what it logs when no flag says otherwise.
    """
    offered = [item for topic in (*topics, "log") for item in _offered(topic)]
    own = dict(defaults or {})

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*, config: str | None, **values: Any) -> Any:
            given = [(item, values.pop(item.name)) for item in offered]
            flags = {item.name: value for item, value in given if _used(item, value)}
            settings = load_settings(flags, config_file=config, defaults=own)
            set_up_logging(settings.log.level or log_level)
            try:
                return function(settings, **values)
            except Exception:
                if level_of(settings) > 1:
                    traceback.print_exc()
                raise

        command: Callable[..., Any] = run
        command = click.version_option(__version__, "--version", message="civetta %(version)s")(
            command
        )
        command = click.option(
            "--config",
            metavar="FILE",
            help="TOML file with settings, see docs/cli.md; flags and environment win over it.",
        )(command)
        for item in reversed(offered):
            command = _click_option(item, own.get(item.name, item.default))(command)
        return command

    return decorate


def level_of(settings: Settings) -> int:
    """How talkative the command is: 0, 1 (-v) or 2 (-vv, --debug)."""
    return 2 if settings.log.debug else settings.log.verbose


def flags_used(*names: str) -> tuple[str, ...]:
    """Of these settings the flags that the running command was given, at another value than the default.

    Settings that the environment or a file made are not among them.
    """
    context = click.get_current_context()
    known = all_settings()
    return tuple(
        known[name].flags[-1]
        for name in names
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        and context.params[name] != known[name].default
    )


def _used(item: Setting, value: object) -> bool:
    """Whether the flag was given: a switch or a repeatable flag that was not has an empty value."""
    return value is not None and bool((item.metavar and not item.many) or value)


def _offered(topic: str) -> list[Setting]:
    name, _, single = topic.partition(".")
    return [item for item in settings_of(name) if single in ("", item.name)]


def _click_option(item: Setting, default: object) -> Callable[[Any], Any]:
    if item.kind == "bool":
        return click.option(*item.flags, item.name, is_flag=True, help=item.help)
    if not item.metavar:
        return click.option(*item.flags, item.name, count=True, help=item.help)
    text = item.help
    if item.choices:
        text += f" One of {', '.join(item.choices)}."
    if default not in (None, "", ()):
        text += f" [{default}]"

    one = replace(item, many=False)

    def parse(raw: str) -> object:
        return parse_value(one, raw, item.flags[-1])

    return click.option(
        *item.flags, item.name, type=parse, metavar=item.metavar, help=text, multiple=item.many
    )


def parse_flags(text: str, topics: Sequence[str], where: str) -> dict[str, object]:
    """Values by setting name of a text of flags, such as "--threads 1"; raises UsageError.

    `topics` are those of `settings_command`; `where` names the text in messages.
    """
    offered = [item for topic in topics for item in _offered(topic)]
    holder: Any = click.command(where)(lambda **values: values)
    for item in offered:
        holder = _click_option(item, None)(holder)
    try:
        with holder.make_context(where, shlex.split(text)) as context:
            given = dict(context.params)
    except ValueError as error:
        raise UsageError(f"{where} is {text[:60]!r}: {error}; close the quotes.") from error
    except click.UsageError as error:
        raise UsageError(
            f"{where}: {error.format_message()} Give flags of this command."
        ) from error
    return {item.name: given[item.name] for item in offered if _used(item, given[item.name])}
