from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from civetta.cli.interrupts import interrupts_deferred


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def body(done: list[str]) -> None:
    with interrupts_deferred():
        interrupt()
        done.append("to its end")


def test_the_body_ends_before_the_interrupt():
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        body(done)
    assert done == ["to its end"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_of_the_body_comes_through_and_the_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ImportError), interrupts_deferred():
        raise ImportError
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_may_use_it():
    faults: list[BaseException] = []

    def use() -> None:
        try:
            with interrupts_deferred():
                pass
        except BaseException as error:  # noqa: BLE001 - told to the test
            faults.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not faults


@pytest.mark.parametrize("module", ["civetta.cli.main", "click"])
def test_ctrl_c_while_the_command_line_is_imported(module):
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from civetta.__main__ import main\n"
        "sys.argv = ['civetta', '--version']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
