"""`civetta cache ls | verify | purge`: look at, check and empty a cache folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from civetta.cli.options import settings_command
from civetta.errors import UsageError

if TYPE_CHECKING:
    from civetta.cache.survey import Found
    from civetta.options import Settings

DAY_S = 86_400.0


@click.group(short_help="List, check or empty a cache folder.")
def cache() -> None:
    """List, check or empty the folder that a server has as --cache-disk."""


@cache.command("ls", short_help="List the states in the folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@settings_command("cache.cache_disk")
def ls(settings: Settings, as_json: bool) -> int:
    """List the stored states, the latest used first. A server may use the folder meanwhile."""
    from civetta.cache.survey import run_bytes, survey

    folder = _folder(settings)
    found, pages = survey(folder), run_bytes(folder)
    rows = [_row(item) for item in found]
    if as_json:
        report = {"entries": rows, "state_bytes": _total(found), "page_bytes": pages}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return 0
    for row in rows:
        text = row["problem"] or f"{row['tokens']} tokens, {row['images']} images"
        click.echo(f"{row['entry'][:16]}  model {row['model'][:8]}  {row['used']}  {text}")
    click.echo(f"{len(rows)} states, {_total(found)} bytes; pages, {pages} bytes")
    return 0


@cache.command("verify", short_help="Read every stored byte and check it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@settings_command("cache.cache_disk")
def verify(settings: Settings, as_json: bool) -> int:
    """Check every byte against its checksum; exit 1 when something is damaged.

    Nothing is changed: a server drops what is damaged when it meets it.
    """
    from civetta.cache.survey import verify as verify_folder

    bad, count = [], 0
    for item, problem in verify_folder(_folder(settings)):
        count += 1
        if problem is not None:
            bad.append({"entry": Path(item.name).stem, "problem": problem})
            if not as_json:
                click.echo(f"{Path(item.name).stem[:16]}  DAMAGED: {problem}")
    if as_json:
        report = {"ok": not bad, "checked": count, "damaged": bad}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        click.echo(f"{count} states checked, {len(bad)} damaged")
    return 1 if bad else 0


@cache.command("purge", short_help="Remove stored states.")
@click.option(
    "--older-than",
    metavar="DAYS",
    type=float,
    default=0.0,
    help="Only states that were not used for DAYS days. [0]",
)
@settings_command("cache.cache_disk")
def purge(settings: Settings, older_than: float) -> int:
    """Remove stored states; refused while a server uses the folder."""
    from civetta.cache.disk import DiskTier
    from civetta.cache.survey import survey

    folder = _folder(settings)
    if not 0 <= older_than < float("inf"):
        raise UsageError(f"--older-than is {older_than:g}: give days, at least 0.")
    survey(folder)  # says so where there is no cache, before anything is made
    tier = DiskTier(folder, budget_bytes=0, model="")
    try:
        before = tier.nbytes
        limit_s = time.time() - older_than * DAY_S
        old = [r.key for r in tier.records(own=False) if r.used_s <= limit_s]
        for key in old:
            tier.remove(key)
        click.echo(f"{len(old)} states removed, {before - tier.nbytes} bytes freed")
    finally:
        tier.close()
    return 0


def _folder(settings: Settings) -> Path:
    if settings.cache.cache_disk is None:
        raise UsageError("No folder is named: give --cache-disk DIR.")
    return Path(settings.cache.cache_disk).expanduser()


def _row(item: Found) -> dict[str, Any]:
    head = None if item.entry is None else item.entry.head
    return {
        "entry": Path(item.name).stem,
        "model": "" if head is None else head.model,
        "tokens": 0 if head is None else head.tokens,
        "images": 0 if head is None else len(head.images),
        "pages": 0 if head is None else sum(run.pages for run in head.runs),
        "state_bytes": item.file_bytes,
        "used": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.used_s)),
        "problem": item.problem,
    }


def _total(found: list[Found]) -> int:
    return sum(item.file_bytes for item in found)
