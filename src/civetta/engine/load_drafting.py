"""From settings to the draft head in use and how to draft with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.checkpoint.existing import existing
from civetta.engine.calibrate import calibrate
from civetta.engine.speculation import Drafting
from civetta.errors import UsageError
from civetta.model.bind_mtp import find_head

if TYPE_CHECKING:
    from pathlib import Path

    from civetta.model.bind_mtp import CheckedHead
    from civetta.model.build import CheckedModel
    from civetta.model.mtp import HiddenNorm
    from civetta.model.trunk import Trunk
    from civetta.options import DraftingOptions

HEAD_NORMS: dict[str, HiddenNorm] = {"wide": "wide", "stream": "stream"}


def draft_head(options: DraftingOptions, checked: CheckedModel) -> CheckedHead | None:
    """The draft head that the settings ask for; None for none.

    Raises CheckpointError, and UsageError when there is no head or nothing to use it for.
    """
    if options.speculative != "mtp":
        if options.mtp_model is not None:
            raise UsageError("--mtp-model is of no use without --speculative mtp; give both")
        return None
    given: Path | None = None
    if options.mtp_model is not None:
        given = existing(options.mtp_model, of="the draft head (--mtp-model)")
    head = find_head(checked.checkpoint, checked.config, given)
    if head is None:
        raise UsageError(
            f"{checked.checkpoint.path} has no draft head and none lies beside it; name one with"
            " --mtp-model, or draft from the text alone with --speculative lookup"
        )
    return head


def drafting_of(options: DraftingOptions, trunk: Trunk) -> Drafting | None:
    """How to draft on this machine, its costs measured now; None for not at all."""
    if options.speculative == "off":
        return None
    launches, steps = calibrate(trunk)
    return Drafting(
        mode="lookup" if trunk.head is None else "mtp",
        most=options.draft_tokens,
        head=trunk.head,
        launches=launches,
        steps=steps,
    )
