"""Which states are kept, which go first, which are written to disk: pure functions of values.

No torch, no clock: ages are arguments, in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPolicy:
    """The numbers of the policy.

    Points of a prompt: at most `max_points`, `min_gap_tokens` apart; on a grid of `grid_tokens`;
    where traffic parts when at least `learn_tokens` are saved. A conversation is active for at most
    `new_active_s` after its first turn and `reused_active_s` after a turn that reused a state
    (returns.py may say less), and not when one that is not kept comes back `outlived` times sooner;
    the worth of a state halves every `half_life_s`. A state goes to disk when its new tokens weigh
    at least 1/`disk_share` of its fixed bytes. A disk state is taken before one in RAM when it
    saves `disk_gain_tokens` more.
    """

    max_points: int = 8
    min_gap_tokens: int = 128
    grid_tokens: int = 2048
    learn_tokens: int = 64
    new_active_s: float = 120.0
    reused_active_s: float = 1800.0
    outlived: float = 1.5
    half_life_s: float = 600.0
    disk_share: int = 16
    disk_gain_tokens: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A kept state as eviction sees it.

    `parent_depth`: tokens of the deepest other state on its way. `freed_bytes`: what its end would
    free. `lineages`: ways on from it to deeper states, 0 at the end of a conversation.
    `elsewhere`: the other tier has it too. `left`: its conversation no longer counts as active.
    """

    entry: int
    depth: int
    parent_depth: int
    freed_bytes: int
    idle_s: float
    hits: int
    lineages: int
    elsewhere: bool
    left: bool = False


def keep_points(
    *,
    prompt_tokens: int,
    cached_tokens: int,
    boundaries: Sequence[int],
    parting: int,
    policy: KeepPolicy,
) -> tuple[int, ...]:
    """Ascending positions above `cached_tokens` at which to keep states; the prompt's end is last.

    `boundaries`: where messages begin, ascending. `parting`: where the prompt leaves what was seen
    before. Earlier kinds of points win over later ones that lie too close to them.
    """
    chosen = [prompt_tokens]
    if parting - cached_tokens >= policy.learn_tokens and parting < prompt_tokens:
        chosen.append(parting)
    for point in _candidates(prompt_tokens, cached_tokens, boundaries, policy):
        if len(chosen) >= policy.max_points:
            break
        near = min(abs(point - other) for other in (*chosen, cached_tokens))
        if near >= policy.min_gap_tokens and cached_tokens < point:
            chosen.append(point)
    return tuple(sorted(chosen))


def _candidates(
    prompt_tokens: int, cached_tokens: int, boundaries: Sequence[int], policy: KeepPolicy
) -> Iterator[int]:
    """System prompt's end, the newest messages' beginnings, the grid; the best first."""
    yield from boundaries[1:2]
    yield from reversed(boundaries[-3:])
    grid = list(range(policy.grid_tokens, prompt_tokens, policy.grid_tokens))
    wanted = [point for point in grid if point > cached_tokens]
    slots = max(policy.max_points - 2, 1)
    stride = -(-len(wanted) // slots)
    for point in wanted[:: max(stride, 1)]:
        # A message's beginning close to the grid is a likelier place to come back to.
        yield min(
            (b for b in boundaries if abs(b - point) <= policy.grid_tokens // 4),
            key=lambda b: abs(b - point),
            default=point,
        )


def worth(kept: Kept, policy: KeepPolicy) -> float:
    """Tokens that a state is expected to save, per byte that it takes."""
    saved = float(kept.depth - kept.parent_depth)
    saved *= math.pow(0.5, kept.idle_s / policy.half_life_s)
    saved *= 1 + min(kept.hits, 3)
    if kept.lineages == 1:
        saved /= 4  # the conversation went on from here
    if kept.elsewhere:
        saved /= 4  # only the time to read it is lost
    return saved / max(kept.freed_bytes, 1)


def is_last_copy(kept: Kept, policy: KeepPolicy) -> bool:
    """Whether an active conversation would lose its newest state."""
    if kept.left:
        return False
    limit_s = policy.reused_active_s if kept.hits else policy.new_active_s
    return kept.lineages == 0 and not kept.elsewhere and kept.idle_s < limit_s


def eviction_order(
    states: Iterable[Kept], policy: KeepPolicy, *, forced: bool = False
) -> list[int]:
    """Entries that may go, the least valuable first.

    Last copies of active conversations are not among them; `forced` puts them at the end instead.
    """
    ranked = sorted(
        (is_last_copy(kept, policy), worth(kept, policy), kept.entry) for kept in states
    )
    return [entry for last, _, entry in ranked if forced or not last]


def wanted_on_disk(
    *,
    depth: int,
    parent_depth: int | None,
    token_bytes: int,
    state_bytes: int,
    policy: KeepPolicy,
) -> bool:
    """Whether a state is worth writing; `parent_depth` None: nothing on its way is on disk."""
    if parent_depth is None:
        return True
    return (depth - parent_depth) * token_bytes * policy.disk_share >= state_bytes
