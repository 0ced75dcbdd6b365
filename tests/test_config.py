from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from civetta.config import load_settings, nearest, parse_value, read_terminal
from civetta.errors import UsageError
from civetta.options import TOPICS, Settings, all_settings, settings_of


def load(flags=None, **more):
    return load_settings(flags or {}, env=more.pop("env", {}), **more)


def test_every_field_is_a_setting_with_a_unique_name_and_flag():
    names = [item.name for topic in TOPICS for item in settings_of(topic)]
    assert len(names) == len(set(names)) == sum(len(dataclasses.fields(c)) for c in TOPICS.values())
    flags = [flag for item in all_settings().values() for flag in item.flags]
    assert len(flags) == len(set(flags))
    for item in all_settings().values():
        assert item.help.endswith(".")
        assert item.kind in {"int", "float", "str", "bool"}
        assert item.flags[-1].startswith("--")


def test_defaults_are_within_their_own_ranges():
    for item in all_settings().values():
        if item.default not in (None, ()) and item.kind != "bool":
            assert parse_value(item, str(item.default), item.flags[-1]) == item.default


def test_nothing_given_is_the_defaults():
    assert load() == Settings()


def test_precedence_is_flag_environment_file_command_default(tmp_path):
    path = tmp_path / "civetta.toml"
    path.write_text("[server]\nport = 1\nmax_connections = 5\n[engine]\nmax_pending = 7\n")
    defaults = {"port": 4, "max_connections": 6, "max_pending": 8, "context": 9}
    env = {"CIVETTA_PORT": "2", "CIVETTA_MAX_CONNECTIONS": "3"}
    found = load({"port": 99}, env=env, config_file=str(path), defaults=defaults)
    assert found.server.port == 99
    assert found.server.max_connections == 3
    assert found.engine.max_pending == 7
    assert found.model.context == 9


def test_host_and_port_have_two_environment_names():
    both = {"HOST": "0.0.0.0", "CIVETTA_HOST": "::1", "PORT": "81"}
    assert load(env=both).server.host == "::1"
    assert load(env=both).server.port == 81
    assert load(env={"HOST": "", "PORT": ""}) == Settings()


def test_configuration_file_from_the_environment(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[sampling]\ntemperature = 1\nseed = 18446744073709551615\n")
    found = load(env={"CIVETTA_CONFIG": str(path)}).sampling
    assert (found.temperature, found.seed) == (1.0, 2**64 - 1)
    assert isinstance(found.temperature, float)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sampling]\ntemprature = 1", ["sampling.temprature", "temperature?"]),
        ("[samplign]\ntop_k = 1", ["[samplign]", "sampling?"]),
        ("[server]\ntemperature = 1", ["server.temperature"]),
        ("top_k = 1", ["top_k"]),
        ("[sampling]\ntop_k = 1.5", ["sampling.top_k", "1.5", "whole number"]),
        ("[sampling]\ntop_k = '5x'", ["sampling.top_k", "'5x'"]),
        ("[sampling]\ntop_k = true", ["sampling.top_k", "True"]),
        ("[sampling]\ntemperature = nan", ["sampling.temperature", "nan"]),
        ("[sampling]\ntemperature = [1]", ["sampling.temperature", "[1]"]),
        ("[log]\ndebug = 1", ["log.debug", "true or false"]),
        ("[model]\nmodel = 5", ["model.model", "5"]),
        ("[model]\ndtype = 'f8'", ["model.dtype", "auto, f32, f16 or bf16"]),
        ("[sampling\n", ["not valid TOML"]),
    ],
)
def test_faulty_files_are_refused_by_name(tmp_path, text, words):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(config_file=str(path))
    for word in [*words, str(path)]:
        assert word in caught.value.message


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"no\.toml"):
        load(config_file=str(tmp_path / "no.toml"))


def test_settings_of_many_values_come_from_flags_words_and_lists(tmp_path):
    assert load().server.api_key == ()
    assert load({"api_key": ("a", "b")}).server.api_key == ("a", "b")
    assert load(env={"CIVETTA_API_KEY": "one two"}).server.api_key == ("one", "two")
    file = tmp_path / "c.toml"
    file.write_text('[server]\ncors_origin = ["https://a.example", "http://b:1"]\n')
    assert load(config_file=str(file)).server.cors_origin == ("https://a.example", "http://b:1")
    for raw in ("[]", '["a b"]', "7", '[""]', '["https://a.example/path/"]'):
        file.write_text(f"[server]\ncors_origin = {raw}\n")
        with pytest.raises(UsageError, match="cors_origin"):
            load(config_file=str(file))


def test_environment_mistakes_name_the_variable():
    with pytest.raises(UsageError, match="CIVETTA_PROT in the environment: did you mean CIVETTA_P"):
        load(env={"CIVETTA_PROT": "1"})
    with pytest.raises(UsageError, match="PORT in the environment is 'http'"):
        load(env={"PORT": "http"})


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("temperature", "2.01"), ("temperature", "nan"), ("temperature", "inf"),
        ("temperature", ""), ("top_p", "-0.1"), ("top_k", "1.0"), ("top_k", "-1"),
        ("seed", str(2**64)), ("seed", "-1"), ("context", "9" * 30), ("device", "gpu"),
        ("device", "cuda:"), ("device", "cpu:0"), ("dtype", "f8"), ("think", "yes"),
        ("reasoning_effort", "none"), ("port", "65536"), ("host", "a b"), ("host", ""),
        ("api_key", "é"), ("api_key", ""), ("model", ""), ("max_tokens", "-2"), ("max_tokens", "0"),
        ("repeat_penalty", "0"), ("prefill_batch", "63"), ("prefill_batch", "8193"),
        ("served_model_name", "a\nb"), ("min_keep", "0"),
    ],
)  # fmt: skip
def test_bad_text_gives_one_sentence_with_the_cure(name, raw):
    setting = all_settings()[name]
    with pytest.raises(UsageError) as caught:
        parse_value(setting, raw, setting.flags[-1])
    assert caught.value.message.startswith(f"{setting.flags[-1]} is ")
    assert caught.value.message.endswith(f"give {setting.wanted}.")
    assert caught.value.exit_code == 2


@given(st.sampled_from(sorted(all_settings())), st.text(max_size=12))
def test_any_text_is_parsed_or_refused(name, raw):
    setting = all_settings()[name]
    try:
        value = parse_value(setting, raw, "--x")
    except UsageError:
        return
    kinds = {"int": int, "float": float, "str": str, "bool": bool}
    values = value if setting.many else (value,)
    assert all(isinstance(item, kinds[setting.kind]) for item in values)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"think": "off", "reasoning_effort": "low"}, "--think is off"),
        ({"log_level": "info", "verbose": 1}, "--log-level"),
        ({"log_level": "info", "debug": True}, "--log-level"),
    ],
)
def test_values_that_exclude_each_other(flags, words):
    with pytest.raises(UsageError, match=words):
        load(flags)


def test_combinations_are_checked_across_sources():
    with pytest.raises(UsageError, match="--think is off"):
        load({"think": "off"}, env={"CIVETTA_REASONING_EFFORT": "high"})
    assert load({"think": "off", "reasoning_effort": "auto"}).reasoning.think == "off"


def test_log_level_of_switches():
    assert load().log.level is None
    assert load({"log_level": "warn"}).log.level == "warn"
    assert load({"verbose": 1}).log.level == load({"debug": True}).log.level == "debug"


def test_terminal_facts():
    assert read_terminal({"NO_COLOR": "1"}).no_color
    assert not read_terminal({"NO_COLOR": ""}).no_color
    assert read_terminal({"TERM": "dumb"}).dumb
    assert not read_terminal({"TERM": "xterm"}).dumb


def test_nearest():
    assert nearest("temprature", ["temperature", "top_k"]) == "temperature"
    assert nearest("zzz", ["temperature", "top_k"]) is None
