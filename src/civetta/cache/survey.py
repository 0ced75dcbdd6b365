"""Looking at a cache folder without using it: what `civetta cache` shows and checks.

Nothing is changed and no lock is taken, so a server may run meanwhile; what it removes between two
looks is not reported as damage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.cache.disk_files import Files
from civetta.cache.disk_folder import ENTRY, RUN, Layout, read_head
from civetta.cache.disk_format import BadEntry, decode_small, digest_of
from civetta.errors import CacheUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from civetta.cache.disk_format import EntryHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A file of the folder: an entry with its head, or one with the reason why it is none."""

    name: str
    file_bytes: int
    used_s: float
    entry: EntryHead | None
    problem: str | None = None


def survey(folder: Path, files: Files | None = None) -> list[Found]:
    """Every entry, the latest used first. Raises CacheUnusable where there is no cache."""
    files = files or Files()
    found = []
    for path, (size, used_s) in _listed(files, folder, ENTRY).items():
        entry, problem = None, None
        try:
            entry = read_head(files, path, size)
        except FileNotFoundError:
            continue
        except (OSError, BadEntry) as error:
            problem = str(error)
        found.append(
            Found(name=path.name, file_bytes=size, used_s=used_s, entry=entry, problem=problem)
        )
    return sorted(found, key=lambda item: -item.used_s)


def run_bytes(folder: Path, files: Files | None = None) -> int:
    """Bytes of all pages, each counted once."""
    files = files or Files()
    return sum(size for size, _ in _listed(files, folder, RUN).values())


def verify(folder: Path, files: Files | None = None) -> Iterator[tuple[Found, str | None]]:
    """Read every byte of every entry; each with what is wrong with it, or None."""
    files = files or Files()
    checked: dict[str, str | None] = {}
    layout = Layout.of(folder)
    for item in survey(folder, files):
        problem = item.problem
        if item.entry is not None:
            problem = _verify_entry(files, layout.entries / item.name, item.entry)
            for run in item.entry.head.runs:
                if run.digest not in checked:
                    path = layout.run(run.digest)
                    checked[run.digest] = _verify_run(files, path, run.digest)
                problem = problem or checked[run.digest]
        if (layout.entries / item.name).exists():
            yield item, problem


def _verify_entry(files: Files, path: Path, entry: EntryHead) -> str | None:
    try:
        decode_small(entry, files.read(path)[entry.body_start :])
    except (OSError, BadEntry) as error:
        return str(error)
    return None


def _verify_run(files: Files, path: Path, digest: str) -> str | None:
    try:
        if digest_of(files.read(path)) != digest:
            return "the checksum of its pages does not match"
    except OSError as error:
        return str(error)
    return None


def _listed(files: Files, folder: Path, suffix: str) -> dict[Path, tuple[int, float]]:
    layout = Layout.of(folder)
    try:
        listing = files.sizes(layout.entries if suffix == ENTRY else layout.runs)
    except OSError as error:
        raise CacheUnusable(
            f"{folder} has no cache that can be read: {error.strerror}; give the folder that the"
            " server has as --cache-disk."
        ) from error
    return {path: facts for path, facts in listing.items() if path.suffix == suffix}
