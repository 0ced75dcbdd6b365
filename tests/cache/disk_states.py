"""States of known bytes in a disk tier, for its tests."""

from __future__ import annotations

import errno
import os

import numpy as np
import torch

from civetta.cache import disk_format
from civetta.cache.disk import DiskTier, RunSource
from civetta.cache.disk_files import Files
from civetta.state.snapshot import SmallState

MODEL, OTHER = "ab" * 32, "cd" * 32
PAGE_TOKENS, PAGE_BYTES = 64, 96


def small(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return SmallState(
        ids_T=np.arange(tokens, dtype=np.int32) + seed,
        rope_3T=torch.arange(tokens).expand(3, -1),
        numbers={"recurrent/base": tokens - tokens % 64},
        parts={
            "recurrent/gdn.0.s": torch.randn(2, 3, 3, generator=generator),
            "recurrent/gdn.0.k": torch.randn(tokens % 64, 2, generator=generator).bfloat16(),
            "recurrent/ple": torch.zeros(4, 0),
        },
        rewindable=min(tokens, 8),
    )


def sources(tokens, salt=b""):
    """One source a run; contents follow from the run's number and the salt."""
    pages = -(-tokens // PAGE_TOKENS)
    made = []
    for n, start in enumerate(range(0, pages, disk_format.RUN_PAGES)):
        count = min(disk_format.RUN_PAGES, pages - start)
        data = (b"%d:%b/" % (n, salt) * PAGE_BYTES)[:PAGE_BYTES] * count
        known = b"%d:%b" % (n, salt) if count == disk_format.RUN_PAGES else None
        made.append(RunSource(known=known, pages=count, read=lambda data=data: data))
    return made


def put(tier, key, tokens=100, *, seed=0, salt=b"", victims=(), images=()):
    tier.publish(
        key, small(tokens, seed), sources(tokens, salt), images,
        page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, victims=victims,
    )  # fmt: skip


def assert_reads(tier, key, tokens, *, seed=0, salt=b""):
    entry, found = tier.read_small(key)
    wanted = small(tokens, seed)
    assert (found.ids_T == wanted.ids_T).all()
    assert torch.equal(found.rope_3T, wanted.rope_3T)
    assert (found.numbers, found.rewindable) == (wanted.numbers, wanted.rewindable)
    assert found.parts.keys() == wanted.parts.keys()
    for name, part in wanted.parts.items():
        assert part.dtype == found.parts[name].dtype
        assert torch.equal(part, found.parts[name])
    runs = [tier.read_run(run) for run in entry.head.runs]
    assert runs == [source.read() for source in sources(tokens, salt)]


def key(n):
    return f"{n:064x}"


def opened(folder, **options):
    return DiskTier(folder, **{"budget_bytes": 1 << 24, "model": MODEL, **options})


class FaultyFiles(Files):
    """Fails the n-th operation, once or from then on; writes stop half-way."""

    def __init__(self):
        self.count = 0
        self.fail_at = None
        self.forever = False
        self.code = errno.ENOSPC

    def arm(self, fail_at, code, *, forever=False):
        self.count, self.fail_at, self.code, self.forever = 0, fail_at, code, forever

    def _step(self):
        self.count += 1
        if self.fail_at is not None and (
            self.count == self.fail_at or (self.forever and self.count > self.fail_at)
        ):
            raise OSError(self.code, os.strerror(self.code))

    def write(self, path, chunks):
        data = b"".join(bytes(chunk) for chunk in chunks)
        try:
            self._step()
        except OSError:
            path.write_bytes(data[: len(data) // 2])
            raise
        return super().write(path, [data])

    def rename(self, source, target):
        self._step()
        super().rename(source, target)

    def sync_folder(self, folder):
        self._step()
        super().sync_folder(folder)

    def read(self, path, start=0, size=None):
        self._step()
        return super().read(path, start, size)

    def remove(self, path):
        self._step()
        super().remove(path)
