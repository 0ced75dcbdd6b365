"""From settings to a cache."""

from __future__ import annotations

import pytest

from civetta.cache.continuation import Continuation
from civetta.cache.off import NoCache
from civetta.cache.protocol import KeepKind, MissReason, Tier
from civetta.cache.setup import CachePlan, build_cache, plan_cache
from civetta.errors import CacheUnusable
from civetta.options import CacheOptions

MODEL = "ef" * 32


def test_the_budget_is_asked_for_or_half_of_what_is_free():
    assert plan_cache(CacheOptions(), 1000, available_bytes=100_000) == CachePlan(
        ram_budget_bytes=50_000, spare_pages=50
    )
    assert plan_cache(CacheOptions(), 1000, available_bytes=1 << 50).ram_budget_bytes == 32 << 30
    asked = plan_cache(CacheOptions(cache_ram_bytes=5500), 1000, available_bytes=1)
    assert (asked.ram_budget_bytes, asked.spare_pages) == (5500, 5)
    off = plan_cache(CacheOptions(cache="off", cache_ram_bytes=5500), 1000, available_bytes=9999)
    assert (off.ram_budget_bytes, off.spare_pages) == (0, 0)


def test_off_keeps_nothing(tiny_trunk):
    store = tiny_trunk.store(sessions=1, context_tokens=128)
    options = CacheOptions(cache="off")
    cache = build_cache(
        options, plan_cache(options, 1, available_bytes=0), store, model=lambda: MODEL
    )
    assert isinstance(cache, NoCache)
    session = store.open()
    point = cache.find([1, 2, 3])
    assert (point.cached_tokens, point.tier, point.miss) == (0, Tier.NONE, MissReason.DISABLED)
    restore = cache.begin(point, session)
    restore.wait(0)
    assert restore.advance()
    restore.cancel()
    assert not cache.keep(session, KeepKind.REPLY)
    assert not cache.make_room(1)
    assert cache.stats().misses_total == 0
    cache.check()
    cache.close()


def test_ram_only_asks_for_no_fingerprint(tiny_trunk):
    store = tiny_trunk.store(sessions=1, context_tokens=128)

    def refuse():
        raise AssertionError("read the model's files for a cache in RAM")

    options = CacheOptions(cache_ram_bytes=1 << 20)
    cache = build_cache(options, plan_cache(options, 1000, available_bytes=0), store, model=refuse)
    assert isinstance(cache, Continuation)
    assert cache.stats().ram_budget_bytes == 1 << 20
    cache.close()


def test_disk_is_opened_once(tiny_trunk, tmp_path):
    store = tiny_trunk.store(sessions=1, context_tokens=128)
    options = CacheOptions(cache_disk=str(tmp_path / "new"), cache_disk_bytes=1 << 20)
    plan = plan_cache(options, store.pool.page_bytes, available_bytes=1 << 22)
    cache = build_cache(options, plan, store, model=lambda: MODEL)
    assert cache.stats().disk_budget_bytes == 1 << 20
    with pytest.raises(CacheUnusable, match="another civetta"):
        build_cache(options, plan, store, model=lambda: MODEL)
    cache.close()


def test_spare_pages_come_on_top(tiny_trunk):
    from civetta.model.trunk import state_shape
    from civetta.state.session import SessionStore

    shape = state_shape(tiny_trunk.config)
    store = SessionStore(
        shape, sessions=2, context_tokens=100, dtype=tiny_trunk.dtype, spare_pages=7
    )
    assert store.pool.pages == 2 * 2 + 7
    layer = store.pool.layers[0]
    parts = (layer.k, layer.v, layer.index_raw, layer.index_key)
    assert store.pool.page_bytes == len(store.pool.layers) * sum(p[0].nbytes for p in parts)
