"""Reading settings: flags over environment over TOML file over defaults, each value checked.

The settings are defined in `options.py`. No other module reads the environment.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from civetta.errors import UsageError
from civetta.options import (
    TOPICS,
    CacheOptions,
    EngineOptions,
    LogOptions,
    ModelOptions,
    ReasoningOptions,
    SamplingOptions,
    ServerOptions,
    Settings,
    all_settings,
)
from civetta.setting import INT_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from civetta.setting import Setting

__all__ = [
    "CacheOptions",
    "EngineOptions",
    "LogOptions",
    "ModelOptions",
    "ReasoningOptions",
    "SamplingOptions",
    "ServerOptions",
    "Settings",
    "Terminal",
    "load_settings",
    "nearest",
    "parse_value",
    "read_cache_folder",
    "read_terminal",
]

CONFIG_FILE_ENV = "CIVETTA_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """What the environment says of the terminal: no colours wanted, no escape codes known."""

    no_color: bool
    dumb: bool


def parse_value(setting: Setting, raw: object, where: str) -> Any:
    """Turn text (flag, environment) or a TOML value into the setting's type, checked.

    `where` names the place for the message, for example "--top-k". A setting of many values gives
    a tuple, from words of a text or a list. Raises UsageError.
    """
    if setting.many:
        items = raw.split() if isinstance(raw, str) else raw
        if not isinstance(items, list) or not items:
            raise UsageError(f"{where} is {_shown(raw)}: give {setting.wanted}.")
        one = replace(setting, many=False)
        return tuple(parse_value(one, item, where) for item in items)
    value = _from_text(setting, raw) if isinstance(raw, str) else _from_toml(setting, raw)
    if value is None or not _allowed(setting, value):
        raise UsageError(f"{where} is {_shown(raw)}: give {setting.wanted}.")
    return value


def load_settings(
    flags: Mapping[str, object],
    *,
    config_file: str | None = None,
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Settings:
    """Merge flags (parsed values by setting name), environment, TOML file and command defaults.

    `config_file` None takes the one named by CIVETTA_CONFIG, if any. Raises UsageError for an
    unknown variable or key (naming the nearest), a bad value, or values that exclude each other.
    """
    env = os.environ if env is None else env
    known = all_settings()
    values: dict[str, object] = dict(defaults or {})
    config_file = config_file or env.get(CONFIG_FILE_ENV) or None
    if config_file is not None:
        values.update(_read_file(Path(config_file), known))
    values.update(_read_env(env, known))
    values.update(flags)
    _check_combinations(values)
    topics = {
        topic: cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})
        for topic, cls in TOPICS.items()
    }
    return Settings(**topics)


def read_terminal(env: Mapping[str, str] | None = None) -> Terminal:
    """Read NO_COLOR and TERM. NO_COLOR counts when it is set and not empty."""
    env = os.environ if env is None else env
    return Terminal(no_color=bool(env.get("NO_COLOR")), dumb=env.get("TERM") == "dumb")


def read_cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """The user's cache folder: XDG_CACHE_HOME when it is an absolute path, else ~/.cache."""
    env = os.environ if env is None else env
    named = Path(env.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path("~/.cache").expanduser()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, or None when none does."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _from_text(setting: Setting, text: str) -> object:
    try:
        if setting.kind == "int":
            return int(text)
        if setting.kind == "float":
            return float(text)
    except ValueError:
        return None
    if setting.kind == "bool":
        return {"1": True, "true": True, "0": False, "false": False}.get(text.lower())
    return text


def _from_toml(setting: Setting, raw: object) -> object:
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
    if not isinstance(raw, kinds.get(setting.kind, ())):
        return None
    if isinstance(raw, bool) != (setting.kind == "bool"):
        return None
    return float(raw) if setting.kind == "float" and isinstance(raw, int) else raw


def _allowed(setting: Setting, value: Any) -> bool:
    if isinstance(value, str):
        if setting.choices:
            return value in setting.choices
        if setting.pattern:
            return re.fullmatch(setting.pattern, value) is not None
        return value != "" and value.isprintable()
    if isinstance(value, bool):
        return True
    if not math.isfinite(value) or (setting.low is not None and value < setting.low):
        return False
    if value in setting.excluded:
        return False
    high = setting.high if setting.high is not None or setting.kind == "float" else INT_MAX
    return bool(high is None or value <= high)


def _read_file(path: Path, known: Mapping[str, Setting]) -> dict[str, object]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read the configuration file {path}: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"The configuration file {path} is not valid TOML: {error}.") from error
    values: dict[str, object] = {}
    for topic, table in document.items():
        if topic not in TOPICS or not isinstance(table, dict):
            raise _unknown(f"section [{topic}]", topic, TOPICS, f"in {path}")
        names = {name for name, setting in known.items() if setting.topic == topic}
        for key, raw in table.items():
            if key not in names:
                raise _unknown(f"key {topic}.{key}", key, names, f"in {path}")
            values[key] = parse_value(known[key], raw, f"{topic}.{key} in {path}")
    return values


def _read_env(env: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, object]:
    names = {CONFIG_FILE_ENV} | {name for item in known.values() for name in item.env_names}
    for name in env:
        if name.startswith("CIVETTA_") and name not in names:
            raise _unknown(f"variable {name}", name, names, "in the environment")
    values: dict[str, object] = {}
    for setting in known.values():
        for name in setting.env_names:
            if env.get(name):
                where = f"{name} in the environment"
                values[setting.name] = parse_value(setting, env[name], where)
                break
    return values


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> UsageError:
    near = nearest(name, known)
    cure = f"did you mean {near}?" if near else f"known are {', '.join(sorted(known))}."
    return UsageError(f"Unknown {what} {where}: {cure}")


def _check_combinations(values: Mapping[str, Any]) -> None:
    if values.get("think") == "off" and values.get("reasoning_effort", "auto") != "auto":
        raise UsageError(
            f"--reasoning-effort {values['reasoning_effort']} needs thinking, but --think is off:"
            " drop one of them."
        )
    if values.get("log_level") is not None and (values.get("verbose") or values.get("debug")):
        raise UsageError("-v and --debug set the log level to debug: drop them or --log-level.")


def _shown(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 80 else text[:77] + "..."
