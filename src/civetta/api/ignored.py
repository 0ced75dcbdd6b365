"""Telling a client, and the log, what of its request had no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.api.account import account_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from civetta.types import Constraint

IGNORED_HEADER = "X-Civetta-Ignored"
_HEADER_CHARS = 2000


def ignored_header(
    request: Request, paths: Sequence[str], constraint: Constraint | None = None
) -> dict[str, str]:
    """The header that names fields without effect, and keywords of schemas that are not carried out.

    No header when there is nothing to name. The log line of the request gets the keywords, without their
    places: these hold names that the client made up.
    """
    gaps = () if constraint is None else constraint.gaps
    account_of(request.scope).schema_ignored = tuple(
        dict.fromkeys(gap.keyword or "schema" for gap in gaps)
    )
    return header_of([*paths, *(gap.path for gap in gaps)])


def header_of(paths: Sequence[str]) -> dict[str, str]:
    """The header that names these paths, one ASCII line; none when there are none.

    What does not fit is three dots.
    """
    shown = ", ".join(ascii(path)[1:-1] for path in paths)
    if len(shown) > _HEADER_CHARS:
        whole, _, _ = shown[: _HEADER_CHARS - len(", ...")].rpartition(", ")
        shown = f"{whole}, ..."
    return {IGNORED_HEADER: shown} if paths else {}
