"""From settings to a cache: how much memory it gets, and what it is made of.

plan = plan_cache(options, page_bytes)
store = trunk.store(..., spare_pages=plan.spare_pages)
cache = build_cache(options, plan, store, model=..., boundary_ids=...)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from civetta.cache.behind import WriteBehind
from civetta.cache.continuation import Continuation
from civetta.cache.disk import DiskTier
from civetta.cache.off import NoCache

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from civetta.cache.protocol import ContinuationCache
    from civetta.options import CacheOptions
    from civetta.state.session import SessionStore

AUTO_SHARE = 2
AUTO_LIMIT_BYTES = 32 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Memory of the cache; its pages come on top of those that sessions may need."""

    ram_budget_bytes: int
    spare_pages: int


def plan_cache(options: CacheOptions, page_bytes: int, *, available_bytes: int) -> CachePlan:
    """The budget that the options ask for; auto is half of what is available, at most 32 GiB.

    Memory is taken as states are kept, not at the start.
    """
    if options.cache == "off":
        return CachePlan(ram_budget_bytes=0, spare_pages=0)
    budget = options.cache_ram_bytes
    if budget == 0:
        budget = min(available_bytes // AUTO_SHARE, AUTO_LIMIT_BYTES)
    return CachePlan(ram_budget_bytes=budget, spare_pages=budget // page_bytes)


def build_cache(
    options: CacheOptions,
    plan: CachePlan,
    store: SessionStore,
    *,
    model: Callable[[], str],
    boundary_ids: Collection[int] = (),
) -> ContinuationCache:
    """The cache over a store. `model` gives the fingerprint; it is asked for a disk tier only.

    `boundary_ids`: tokens that messages begin with. Raises CacheUnusable.
    """
    if options.cache == "off":
        return NoCache()
    behind = None
    if options.cache_disk is not None:
        folder = Path(options.cache_disk).expanduser()
        disk = DiskTier(folder, budget_bytes=options.cache_disk_bytes, model=model())
        behind = WriteBehind(disk)
    return Continuation(
        store.pool,
        ram_budget_bytes=plan.ram_budget_bytes,
        boundary_ids=boundary_ids,
        behind=behind,
    )
