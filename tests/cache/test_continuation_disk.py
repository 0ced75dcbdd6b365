"""The cache over both tiers: restarts, damage, shortage."""

from __future__ import annotations

import errno

import pytest

from cache.disk_states import FaultyFiles
from cache.worlds import World, assert_turn, finish, random_ids
from civetta.cache.protocol import MissReason, Tier
from civetta.errors import EngineBusy


def test_a_restart_keeps_what_was_known(tiny_trunk, tmp_path):
    """cases.md A9."""
    talk, reply, more = random_ids(400, 1), random_ids(10, 2), random_ids(40, 3)
    world = World(tiny_trunk, folder=tmp_path)
    assert_turn(world, talk, reply)
    world.close(drain_s=30)
    world = World(tiny_trunk, folder=tmp_path)
    point = assert_turn(world, [*talk, *reply, *more], [1])
    assert (point.cached_tokens, point.tier, point.miss) == (410, Tier.DISK, None)
    again = assert_turn(world, [*talk, *reply, 9], [1])
    assert (again.cached_tokens, again.tier) == (410, Tier.RAM)
    assert world.cache.stats().hits_disk_total == 1
    world.close()


def test_disk_is_asked_when_it_reaches_deeper(tiny_trunk, tmp_path):
    talk = random_ids(600, 1)
    world = World(tiny_trunk, folder=tmp_path)
    assert_turn(world, talk, [1])
    world.close(drain_s=30)
    world = World(tiny_trunk, folder=tmp_path)
    assert_turn(world, [*talk[:200], 254], [1])
    point = assert_turn(world, [*talk, 1, 2], [3])
    assert (point.cached_tokens, point.tier) == (601, Tier.DISK)
    world.close()


def test_damage_costs_time_only(tiny_trunk, tmp_path, caplog):
    talk = random_ids(300, 1)
    world = World(tiny_trunk, folder=tmp_path)
    assert_turn(world, talk, [1])
    world.close(drain_s=30)
    for path in (tmp_path / "civetta-cache" / "runs").iterdir():
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(bytes(raw))
    world = World(tiny_trunk, folder=tmp_path)
    point = world.cache.find(talk)
    assert point.tier is Tier.DISK
    session = world.store.open()
    restore = world.cache.begin(point, session)
    while not restore.advance():
        restore.wait(10)
    assert (restore.tokens, restore.miss, session.position) == (0, MissReason.DAMAGED, 0)
    assert "cache_entry_dropped" in caplog.text
    session.close()
    assert world.cache.stats().damaged_total == 1
    assert_turn(world, talk, [1])  # meets the other damaged state, and computes everything
    assert world.cache.stats().damaged_total == 2
    assert world.cache.find(talk).tier is Tier.RAM
    world.close()


def test_a_cancelled_restore_gives_its_pages_back(tiny_trunk, tmp_path):
    talk = random_ids(900, 1)
    world = World(tiny_trunk, folder=tmp_path)
    assert_turn(world, talk, [1])
    world.close(drain_s=30)
    world = World(tiny_trunk, folder=tmp_path)
    for pieces in range(3):
        session = world.store.open()
        restore = world.cache.begin(world.cache.find(talk), session)
        for _ in range(pieces):
            restore.wait(10)
            assert not restore.advance()
        restore.cancel()
        restore.cancel()
        session.close()
        world.cache.check()
        assert world.store.pool.free_pages == world.store.pool.pages
    left = world.cache.begin(world.cache.find(talk), world.store.open())
    left.wait(10)
    world.close()


def test_a_restore_without_room_leaves_the_session_empty(tiny_trunk, tmp_path):
    talk = random_ids(900, 1)
    world = World(tiny_trunk, folder=tmp_path)
    assert_turn(world, talk, [1])
    world.close(drain_s=30)
    world = World(tiny_trunk, folder=tmp_path, sessions=1, spare=0)
    hog = world.store.open()
    hog.reserve(900)
    session = world.store.open()
    restore = world.cache.begin(world.cache.find(talk), session)
    with pytest.raises(EngineBusy):
        finish(restore)
    assert restore.advance()
    assert (restore.tokens, session.position, session.pages) == (0, 0, [])
    hog.close()
    session.close()
    world.close()


def test_the_disk_budget_holds(tiny_trunk, tmp_path):
    world = World(tiny_trunk, folder=tmp_path, disk_bytes=1_500_000)
    for n in range(8):
        assert_turn(world, random_ids(200, n), [1])
        world.settle()
        stats = world.cache.stats()
        assert stats.disk_bytes <= 1_500_000
    assert 1 <= stats.entries_disk < 8
    assert world.cache.find(random_ids(200, 7)).cached_tokens == 199
    world.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_costs_no_reply(tiny_trunk, tmp_path, code, caplog):
    """Full or broken at any operation, then well again: replies are a cold server's throughout."""
    files, talk = FaultyFiles(), random_ids(120, 1)
    world = World(tiny_trunk, folder=tmp_path, files=files)
    for n in range(12):
        files.arm(1 + n, code, forever=n % 2 == 0)
        talk = [*talk, *random_ids(30, n)]
        assert_turn(world, talk, [1, 2])
        world.settle()
    assert "cache_write_failed" in caplog.text
    files.arm(None, code)
    assert_turn(world, [*talk, 5], [1, 2])
    world.settle()
    world.close(drain_s=30)
    world = World(tiny_trunk, folder=tmp_path)
    point = assert_turn(world, [*talk, 5, 1, 2, 9], [3])
    assert (point.cached_tokens, point.tier) == (len(talk) + 3, Tier.DISK)
    assert world.cache.stats().damaged_total == 0
    world.close()
