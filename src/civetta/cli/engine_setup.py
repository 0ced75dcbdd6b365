"""From settings to a running engine; the one place where commands meet torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.cli.interrupts import interrupts_deferred
from civetta.cli.loading_bar import LoadingBar

if TYPE_CHECKING:
    from civetta.engine.protocol import EngineClient
    from civetta.options import Settings


def build_engine(settings: Settings) -> EngineClient:
    """Load the model that the settings name, the embedded one when they name none.

    Raises CheckpointError, TokenizerError or DeviceError.
    """
    with interrupts_deferred():
        from civetta.engine.load import load_engine

    with LoadingBar() as bar:
        return load_engine(settings, progress=bar)
