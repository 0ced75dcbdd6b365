"""Which drafted tokens stand: the target's rows decide every token, a draft only saves launches.

Row i of a verified launch is the ordinary row behind the newest token and i drafted ones. Its token
is chosen as if nothing had been drafted; the draft stands if it is that very token, and the next
row counts. So a reply cannot depend on drafts (design.md section 2): no probability is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from civetta.decode.shortlist import sample

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from civetta.decode.mask import TokenMask
    from civetta.decode.sampler import Sampled, SampleRow
    from civetta.decode.shortlist import LogitRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Tokens chosen by the target, one at least, and how many of them were drafted rightly.

    `surplus`: rows of the launch behind the one that chose the last token; the sequence gives them
    back.
    """

    tokens: tuple[Sampled, ...]
    accepted: int
    surplus: int


def accept(
    draft_ids: Sequence[int],
    rows: Sequence[LogitRow],
    row: SampleRow,
    end_ids: Collection[int] = (),
    masks: Sequence[TokenMask | None] | None = None,
) -> Verdict:
    """Choose tokens from the rows [1 + drafts, V] of a launch, the first of them with `row`.

    Nothing is chosen behind a token of `end_ids`. `masks`, where there are any, belong to the rows;
    they may end behind a draft that no row can choose. `row.history` is as before when this returns.
    Raises LogitsInvalid for the first bad row that is needed.
    """
    assert len(rows) == len(draft_ids) + 1, "a row for the newest token and for each draft"
    tokens: list[Sampled] = []
    accepted = 0
    try:
        for i, logits in enumerate(rows):
            mask = None if masks is None else masks[i]
            sampled = sample(logits, replace(row, position=row.position + i, mask=mask))
            tokens.append(sampled)
            if i == len(draft_ids) or sampled.token_id != draft_ids[i]:
                break
            accepted += 1
            if sampled.token_id in end_ids:
                break
            row.history.append(sampled.token_id)
    finally:
        row.history.rewind(len(row.history) - row.position)
    return Verdict(
        tokens=tuple(tokens), accepted=accepted, surplus=len(draft_ids) + 1 - len(tokens)
    )
