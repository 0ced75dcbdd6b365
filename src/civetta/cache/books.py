"""Running totals of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from civetta.cache.protocol import CacheStats


@dataclass(slots=True, kw_only=True)
class Totals:
    """Counters since the start; written by the step thread, read by anybody."""

    hits_ram: int = 0
    hits_disk: int = 0
    misses: int = 0
    kept: int = 0
    refused: int = 0
    evicted: int = 0
    damaged: int = 0

    def stats(
        self,
        *,
        entries_ram: int,
        ram_bytes: int,
        ram_budget_bytes: int,
        entries_disk: int,
        disk_bytes: int,
        disk_budget_bytes: int,
        disk_queue: int,
    ) -> CacheStats:
        """The totals with what is held now."""
        return CacheStats(
            entries_ram=entries_ram,
            entries_disk=entries_disk,
            ram_bytes=ram_bytes,
            ram_budget_bytes=ram_budget_bytes,
            disk_bytes=disk_bytes,
            disk_budget_bytes=disk_budget_bytes,
            disk_queue=disk_queue,
            hits_ram_total=self.hits_ram,
            hits_disk_total=self.hits_disk,
            misses_total=self.misses,
            kept_total=self.kept,
            refused_total=self.refused,
            evicted_total=self.evicted,
            damaged_total=self.damaged,
        )
