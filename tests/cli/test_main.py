from __future__ import annotations

import subprocess
import sys

import click
import pytest

from civetta import __version__
from civetta.cli import main as main_module
from civetta.cli.main import COMMANDS, Entry, root, run
from civetta.cli.options import settings_command
from civetta.errors import CheckpointNotFound


@pytest.fixture
def boom(monkeypatch):
    """A command `boom` that raises what the test says."""

    def install(error):
        @click.command()
        @settings_command("model")
        def boom(settings):
            raise error

        monkeypatch.setattr(main_module, "BOOM", boom, raising=False)
        monkeypatch.setitem(COMMANDS, "boom", Entry("civetta.cli.main", "BOOM", "Explode."))

    return install


@pytest.mark.parametrize(
    "command", [[], *([name] for name in COMMANDS if name != "cache"), ["cache", "ls"]]
)
def test_every_command_tells_its_version(capsys, command):
    assert run([*command, "--version"]) == 0
    assert capsys.readouterr().out == f"civetta {__version__}\n"


def test_help_lists_every_command_without_importing_any():
    code = (
        "import sys\n"
        "from civetta.cli.main import run, COMMANDS\n"
        "assert run(['--help']) == 0\n"
        "loaded = [e.module for e in COMMANDS.values() if e.module in sys.modules]\n"
        "assert not loaded, loaded\n"
        "for name in ('serve', 'prompt', 'chat', 'diagnose'):\n"
        "    assert run([name, '--help']) == 0\n"
        "import civetta.api.app\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, entry in COMMANDS.items():
        assert f"{name} " in done.stdout
        assert entry.summary in done.stdout


def test_python_m_civetta():
    done = subprocess.run(
        [sys.executable, "-m", "civetta", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"civetta {__version__}\n"


def test_no_command_shows_the_help(civetta):
    assert civetta() == (0, civetta("--help").out, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv"], "Unknown command 'serv': did you mean serve?"),
        (["zzz"], "Unknown command 'zzz': there are chat, prompt"),
        (["--nope"], "Unknown option --nope. See civetta --help."),
        (["serve", "--prot", "1"], "Unknown option --prot: did you mean --port?"),
        (["serve", "-p"], "requires an argument"),
        (["serve", "-p", "x"], "--port is 'x': give a whole number from 0 to 65535."),
        (["serve", "llm", "extra"], "extra"),
        (["serve", "tts"], "Unknown service 'tts'"),
        (["serve", "-j", "0"], "--sessions is '0'"),
        (["serve", "-v", "--log-level", "warn"], "--log-level"),
        (["serve", "--think", "off", "--reasoning-effort", "max"], "--think is off"),
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["diagnose", "--dtype", "f8"], "--dtype is 'f8': give auto, f32, f16 or bf16."),
        (["diagnose", "--json=1"], "--json"),
    ],
)
def test_wrong_usage_is_one_sentence_and_status_2(civetta, arguments, words):
    result = civetta(*arguments)
    assert result.status == 2
    assert result.out == ""
    assert result.err.startswith("civetta: error[usage]: ")
    assert result.err.count("\n") == 1
    assert words in result.err


def test_an_error_of_the_tree_is_one_line_with_its_code_and_status(civetta, boom):
    boom(CheckpointNotFound("There is no\nfile."))
    assert civetta("boom") == (1, "", "civetta: error[checkpoint_not_found]: There is no file.\n")


@pytest.mark.parametrize("switches", [["-vv"], ["-v", "-v"], ["--debug"]])
def test_a_traceback_on_request_only(civetta, boom, monkeypatch, switches):
    boom(CheckpointNotFound("Gone."))
    assert "Traceback" not in civetta("boom", "-v").err
    shown = civetta("boom", *switches).err
    assert "Traceback" in shown
    assert shown.endswith("civetta: error[checkpoint_not_found]: Gone.\n")
    monkeypatch.setenv("CIVETTA_DEBUG", "1")
    assert civetta("boom").err.count("Traceback") == 1


def test_a_fault_of_ours_is_told_too(civetta, boom):
    boom(ZeroDivisionError("by zero"))
    result = civetta("boom")
    assert result.status == 70
    assert result.err == (
        "civetta: error[internal]: ZeroDivisionError: by zero. This is a fault of civetta;"
        " --debug shows where.\n"
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (click.Abort(), 130), (BrokenPipeError(), 141)],
)
def test_interrupts_and_closed_pipes_are_quiet(civetta, boom, monkeypatch, error, status):
    boom(error)
    monkeypatch.setattr(main_module, "_abandon", lambda _: None)
    assert civetta("boom") == (status, "", "")


def test_a_reader_that_leaves_is_quiet():
    code = "import sys; from civetta.cli.main import main; main()"
    reader = f"{sys.executable} -c '{code}' serve --help | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", reader], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("Usage: civetta serve")


def test_every_command_of_the_table_that_exists_can_be_imported():
    context = click.Context(root)
    for name in ("serve", "diagnose", "prompt", "chat"):
        assert root.get_command(context, name) is not None
    assert run(["serve", "--help"]) == 0
