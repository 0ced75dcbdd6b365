"""`civetta cache`: what is listed, what is found damaged, what is removed."""

from __future__ import annotations

import json
import os

import pytest

from cache import worlds
from civetta.cache.disk import DiskTier
from civetta.cache.disk_folder import FOLDER
from civetta.cli.main import run
from civetta.model.build import load_trunk
from civetta.model.tiny import write_tiny


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    return load_trunk(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def folder(filled, tmp_path):
    world = worlds.World(filled, folder=tmp_path)
    world.turn(list(range(100)), [1])
    world.turn(list(range(50, 200)), [1])
    world.close(drain_s=30)
    return tmp_path


def entries(folder):
    return sorted((folder / FOLDER / "entries").iterdir())


def test_ls_shows_states(folder, capsys):
    assert run(["cache", "ls", "--cache-disk", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"model {worlds.MODEL[:8]}" in out
    assert "100 tokens, 0 images" in out
    assert run(["cache", "ls", "--json", "--cache-disk", str(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["entries"]) == len(entries(folder))
    assert report["state_bytes"] == sum(p.stat().st_size for p in entries(folder))
    assert all(row["problem"] is None for row in report["entries"])


def test_ls_works_while_a_server_has_the_folder(folder, capsys):
    tier = DiskTier(folder, budget_bytes=1 << 30, model=worlds.MODEL)
    assert run(["cache", "ls", "--cache-disk", str(folder)]) == 0
    assert run(["cache", "verify", "--cache-disk", str(folder)]) == 0
    assert run(["cache", "purge", "--cache-disk", str(folder)]) == 1
    assert "another civetta uses it" in capsys.readouterr().err
    tier.close()


def test_verify_names_what_is_damaged(folder, capsys):
    assert run(["cache", "verify", "--cache-disk", str(folder)]) == 0
    victim = entries(folder)[0]
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(bytes(raw))
    capsys.readouterr()
    assert run(["cache", "verify", "--cache-disk", str(folder)]) == 1
    assert f"{victim.stem[:16]}  DAMAGED: the checksum of" in capsys.readouterr().out
    assert run(["cache", "verify", "--json", "--cache-disk", str(folder)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["damaged"][0]["entry"]) == (False, victim.stem)
    assert victim.exists()


def test_purge_removes_all_or_the_old(folder, capsys):
    old = entries(folder)[0]
    os.utime(old, (1, 1))
    count = len(entries(folder))
    assert run(["cache", "purge", "--older-than", "2", "--cache-disk", str(folder)]) == 0
    assert "1 states removed" in capsys.readouterr().out
    assert len(entries(folder)) == count - 1
    assert run(["cache", "purge", "--cache-disk", str(folder)]) == 0
    assert entries(folder) == []
    assert list((folder / FOLDER / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["ls"], 2, "give --cache-disk DIR"),
        (["ls", "--cache-disk", "/nowhere/at/all"], 1, "has no cache that can be read"),
        (["purge", "--cache-disk", "/nowhere/at/all"], 1, "has no cache that can be read"),
        (["purge", "--older-than", "-1", "--cache-disk", "."], 2, "give days"),
        (["lss"], 2, "No such command"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, status, message, capsys):
    assert run(["cache", *arguments]) == status
    err = capsys.readouterr().err
    assert err.startswith("civetta: error[")
    assert message in err
    assert err.count("\n") == 1
