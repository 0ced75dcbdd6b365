"""Which points are kept, and which states go."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from civetta.cache.policy import (
    KeepPolicy,
    Kept,
    eviction_order,
    is_last_copy,
    keep_points,
    wanted_on_disk,
    worth,
)

POLICY = KeepPolicy()
STATE = Kept(
    entry=1, depth=1000, parent_depth=0, freed_bytes=100, idle_s=10, hits=0, lineages=0,
    elsewhere=False,
)  # fmt: skip


def points(prompt_tokens, cached_tokens=0, boundaries=(), parting=0, policy=POLICY):
    return keep_points(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        boundaries=boundaries,
        parting=parting,
        policy=policy,
    )


@given(
    prompt_tokens=st.integers(1, 40_000),
    cached=st.integers(0, 40_000),
    boundaries=st.lists(st.integers(0, 40_000), max_size=40),
    parting=st.integers(0, 40_000),
)
def test_points_are_few_apart_and_end_with_the_prompt(prompt_tokens, cached, boundaries, parting):
    cached = min(cached, prompt_tokens - 1)
    inside = sorted({b for b in boundaries if b < prompt_tokens})
    found = points(prompt_tokens, cached, inside, min(parting, prompt_tokens))
    assert found[-1] == prompt_tokens
    assert list(found) == sorted(set(found))
    assert len(found) <= POLICY.max_points
    assert all(cached < point <= prompt_tokens for point in found)
    free = [p for p in found if p not in (prompt_tokens, parting)]
    gaps = [abs(a - b) for a in free for b in (*found, cached) if a != b]
    assert all(gap >= POLICY.min_gap_tokens for gap in gaps)


def test_short_prompts_have_their_end_only():
    assert points(40, boundaries=(0, 20, 35)) == (40,)


def test_system_prompt_and_newest_message_are_kept():
    assert points(5000, boundaries=(0, 1500, 4600, 4995)) == (1500, 2048, 4600, 5000)


def test_where_traffic_parts_is_kept():
    assert points(900, cached_tokens=300, parting=500) == (500, 900)
    assert points(900, cached_tokens=300, parting=340) == (900,)


def test_a_grid_over_long_prompts():
    found = points(60_000)
    assert len(found) == 7
    assert all(point % POLICY.grid_tokens == 0 for point in found[:-1])
    assert max(b - a for a, b in zip((0, *found), found, strict=False)) < 16_000


def test_the_grid_moves_to_a_message_close_by():
    assert 2100 in points(4000, boundaries=(0, 40, 2100, 3000, 3100, 3200, 3990))


def test_worth_counts_tokens_bytes_and_age():
    assert worth(replace(STATE, depth=2000), POLICY) == 2 * worth(STATE, POLICY)
    assert worth(replace(STATE, freed_bytes=200), POLICY) == worth(STATE, POLICY) / 2
    older = replace(STATE, idle_s=STATE.idle_s + POLICY.half_life_s)
    assert abs(worth(older, POLICY) / worth(STATE, POLICY) - 0.5) < 1e-9
    assert worth(replace(STATE, lineages=1), POLICY) < worth(STATE, POLICY)
    assert worth(replace(STATE, lineages=2), POLICY) == worth(STATE, POLICY)
    assert worth(replace(STATE, parent_depth=990), POLICY) < worth(STATE, POLICY) / 50


def test_an_active_conversation_keeps_its_last_copy():
    assert is_last_copy(STATE, POLICY)
    assert not is_last_copy(replace(STATE, lineages=1), POLICY)
    assert not is_last_copy(replace(STATE, elsewhere=True), POLICY)
    assert not is_last_copy(replace(STATE, idle_s=POLICY.new_active_s), POLICY)
    used = replace(STATE, hits=1, idle_s=POLICY.new_active_s)
    assert is_last_copy(used, POLICY)
    superseded = replace(STATE, entry=2, lineages=1)
    assert eviction_order([STATE, superseded], POLICY) == [2]
    assert eviction_order([STATE, superseded], POLICY, forced=True) == [2, 1]


def test_disk_takes_what_is_new_enough():
    def wanted(depth, parent):
        return wanted_on_disk(
            depth=depth, parent_depth=parent, token_bytes=25_348, state_bytes=118_000_000,
            policy=POLICY,
        )  # fmt: skip

    assert wanted(10, None)
    assert not wanted(10_100, 10_000)
    assert wanted(10_300, 10_000)
