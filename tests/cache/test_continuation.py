"""The cache on a real trunk: every reply is the cold one's to the bit, and little is missed."""

from __future__ import annotations

import pytest

from cache.worlds import SMALL_STEPS, World, assert_turn, random_ids
from civetta.cache.protocol import CacheStats, ImageMark, KeepKind, MissReason, RestorePoint, Tier
from civetta.errors import EngineBusy

BOUNDARY = 255


def test_the_whole_last_turn_is_reused(tiny_trunk):
    """cases.md A1: a second turn pays for its own text only."""
    world = World(tiny_trunk)
    first, reply, more = random_ids(300, 1), random_ids(20, 2), random_ids(50, 3)
    assert assert_turn(world, first, reply).miss is MissReason.COLD
    point = assert_turn(world, [*first, *reply, *more], random_ids(5, 4))
    assert (point.cached_tokens, point.tier, point.miss) == (320, Tier.RAM, None)
    world.close()


@pytest.mark.parametrize("tokens", [1, 2, 7, 30, 63])
def test_short_prompts_are_reused(tiny_trunk, tokens):
    """cases.md A2: no floor under the length of what is kept."""
    world = World(tiny_trunk)
    first, reply = random_ids(tokens, 1), random_ids(3, 2)
    assert_turn(world, first, reply)
    point = assert_turn(world, [*first, *reply, 5], reply)
    assert point.cached_tokens == tokens + 3
    world.close()


@pytest.mark.parametrize("tokens", [1, 8, 64, 65, 128, 300])
def test_identical_prompts_compute_one_row(tiny_trunk, tokens):
    """cases.md A5: the row whose logits are needed, and no other."""
    world = World(tiny_trunk)
    prompt, reply = random_ids(tokens, 1), random_ids(4, 2)
    assert_turn(world, prompt, reply)
    for _ in range(2):
        assert assert_turn(world, prompt, reply).cached_tokens == tokens - 1
    world.close()


def test_an_edit_in_the_middle_restores_the_deepest_state_before_it(tiny_trunk):
    """cases.md A4: AAAABBBB, then AAAACBBBB."""
    world = World(tiny_trunk, policy=SMALL_STEPS)
    a, b, c = random_ids(256, 1), random_ids(256, 2), random_ids(64, 3)
    assert_turn(world, [*a, *b], [1, 2])
    point = assert_turn(world, [*a, *c, *b], [1, 2])
    assert point.cached_tokens == 256
    assert (point.miss, point.miss_token) == (MissReason.DIVERGED, 256)
    world.close()


def test_a_rewound_reply_is_found_from_the_prompt(tiny_trunk):
    """cases.md A10, A15: the reply is cut off or left out; up to 8 last tokens may differ too."""
    world = World(tiny_trunk)
    prompt, reply = random_ids(200, 1), random_ids(30, 2)
    assert_turn(world, prompt, reply)
    assert assert_turn(world, [*prompt[:-6], *random_ids(40, 3)], [1]).cached_tokens == 194
    assert assert_turn(world, [*prompt, *reply[:11], 254, 254], [1]).cached_tokens == 200
    assert assert_turn(world, [*prompt, *reply[:25], 254, 254], [1]).cached_tokens == 225
    world.close()


def test_the_third_of_a_kind_hits(tiny_trunk):
    """Traffic parts after 150 tokens; the second request learns it, the third profits."""
    world = World(tiny_trunk)
    shared = random_ids(150, 1)
    points = [assert_turn(world, [*shared, *random_ids(100, n)], [1]) for n in range(2, 6)]
    assert [point.cached_tokens for point in points] == [0, 0, 150, 150]
    assert [point.miss for point in points] == [
        MissReason.COLD, MissReason.NO_POINT, MissReason.DIVERGED, MissReason.DIVERGED,
    ]  # fmt: skip
    world.close()


def test_a_system_prompt_is_shared_at_once(tiny_trunk):
    world = World(tiny_trunk, boundary_ids=(BOUNDARY,))
    system = [BOUNDARY, *random_ids(180, 1)]
    for n in range(2, 5):
        point = assert_turn(world, [*system, BOUNDARY, *random_ids(140, n)], [1])
        assert point.cached_tokens == (181 if n > 2 else 0)
    world.close()


def test_images_belong_to_the_prefix(tiny_trunk):
    """Tokens alike, images not: nothing after the image is reused."""
    world = World(tiny_trunk)
    prompt = random_ids(200, 1)

    def marks(*digests):
        return [ImageMark(position=80 * (n + 1), digest=d * 32) for n, d in enumerate(digests)]

    assert_turn(world, prompt, [1], images=marks(b"a", b"b"))
    assert world.cache.find(prompt, marks(b"a", b"b")).cached_tokens == 199
    other = world.cache.find(prompt, marks(b"a", b"c"))
    assert (other.cached_tokens, other.miss, other.miss_token) == (0, MissReason.NO_POINT, 0)
    assert 160 in other.keep_at
    assert_turn(world, prompt, [1], images=marks(b"a", b"c"))
    third = world.cache.find(prompt, marks(b"a", b"d"))
    assert (third.cached_tokens, third.miss, third.miss_token) == (160, MissReason.IMAGES, 160)
    # An image that only later tokens see changes nothing before it.
    longer = world.cache.find([*prompt, *prompt], [*marks(b"a", b"b"),
                              ImageMark(position=300, digest=b"z" * 32)])  # fmt: skip
    assert longer.cached_tokens >= 200
    world.close()


def test_images_whose_symbols_agree_are_told_apart(tiny_trunk):
    world = World(tiny_trunk)
    prompt = random_ids(100, 1)
    first, second = b"1234567" + b"a" * 25, b"1234567" + b"b" * 25
    assert_turn(world, prompt, [1], images=[ImageMark(position=10, digest=first)])
    assert world.cache.find(prompt, [ImageMark(position=10, digest=first)]).cached_tokens == 99
    assert world.cache.find(prompt, [ImageMark(position=10, digest=second)]).cached_tokens == 0


def test_keeping_never_exceeds_the_budget_nor_the_last_copies(tiny_trunk):
    probe = World(tiny_trunk)
    assert_turn(probe, random_ids(200, 1), [1])
    one_bytes = probe.cache.stats().ram_bytes
    probe.close()
    world = World(tiny_trunk, ram_bytes=3 * one_bytes)
    talks = [random_ids(200, n) for n in range(6)]
    for talk in talks:
        assert_turn(world, talk, [1])
        world.clock.now_s += 1
    stats = world.cache.stats()
    assert stats.refused_total > 0
    assert stats.ram_bytes <= stats.ram_budget_bytes
    # Round after round over more conversations than there is room for: some are always found.
    for _ in range(3):
        found = [world.cache.find([*talk, 1, 2]).cached_tokens for talk in talks]
        assert sum(count > 0 for count in found) >= 2
        for talk in talks:
            assert_turn(world, [*talk, 1, 2], [3])
            world.clock.now_s += 1
    world.clock.now_s += 10_000  # all have gone home
    assert_turn(world, random_ids(200, 50), [1])
    assert world.cache.find(random_ids(200, 50)).cached_tokens == 199
    assert any(world.cache.find([*talk, 1, 2]).miss is MissReason.EVICTED for talk in talks)
    world.close()


def test_a_state_beyond_the_budget_evicts_nobody(tiny_trunk):
    world = World(tiny_trunk, ram_bytes=600_000)
    assert_turn(world, random_ids(50, 1), [1])
    world.clock.now_s += 10_000
    before = world.cache.stats().entries_ram
    assert before >= 1
    session, _, _ = world.prefill(random_ids(1000, 2))
    assert not world.cache.keep(session, KeepKind.REPLY)
    session.close()
    assert world.cache.stats().entries_ram == before
    world.close()


def test_room_is_made_for_requests(tiny_trunk):
    world = World(tiny_trunk, sessions=1, spare=16)
    for n in range(3):
        session, _, _ = world.prefill(random_ids(500, n))
        session.close()
    hog = world.store.open()
    with pytest.raises(EngineBusy):
        hog.reserve(1024)
    assert world.cache.make_room(16)
    hog.reserve(1024)
    assert not world.cache.make_room(1000)
    world.cache.check()
    assert world.cache.stats().entries_ram == 0
    hog.close()
    world.close()


def test_a_point_whose_state_went_meanwhile(tiny_trunk):
    world = World(tiny_trunk)
    prompt = random_ids(100, 1)
    assert_turn(world, prompt, [1])
    point = world.cache.find(prompt)
    world.cache.make_room(world.store.pool.pages)
    session = world.store.open()
    restore = world.cache.begin(point, session)
    assert restore.advance()
    assert (restore.tokens, session.position) == (0, 0)
    assert world.cache.begin(RestorePoint(cached_tokens=0), session).advance()
    session.close()
    world.close()


def test_stats_add_up(tiny_trunk):
    world = World(tiny_trunk)
    assert world.cache.stats() == CacheStats(ram_budget_bytes=1 << 28)
    prompt = random_ids(100, 1)
    assert_turn(world, prompt, [1])
    assert_turn(world, prompt, [1])
    stats = world.cache.stats()
    assert (stats.hits_ram_total, stats.misses_total, stats.kept_total) == (1, 1, 2)
    assert stats.ram_bytes > 0
    world.close()
