"""Why a prompt was not reused, or not deeper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.cache.protocol import MissReason
from civetta.state.recurrent import REWIND_ROWS

if TYPE_CHECKING:
    from civetta.cache.index import Match
    from civetta.cache.policy import KeepPolicy

FEW_TOKENS = 16
"""A common start that is shorter says nothing: every prompt begins alike."""


def miss_of(
    match: Match, cached: int, prompt_tokens: int, policy: KeepPolicy
) -> tuple[MissReason | None, int | None]:
    """The reason of a miss and its token; see `RestorePoint`."""
    known = min(match.common, prompt_tokens - 1)
    if known - cached >= policy.learn_tokens:
        lost = any(cached < depth <= match.common + REWIND_ROWS for depth in match.lost_depths)
        return (MissReason.EVICTED if lost else MissReason.NO_POINT), cached
    if match.common >= prompt_tokens:
        return None, None
    if match.image_differs:
        return MissReason.IMAGES, match.common
    if match.common < FEW_TOKENS and not cached:
        return MissReason.COLD, match.common
    if match.extends:
        return None, None
    return MissReason.DIVERGED, match.common
