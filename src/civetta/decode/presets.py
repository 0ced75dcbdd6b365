"""Which sampling a request gets: its own values, else the server's, else the model's preset.

The presets are Qwen3.8's, one a thinking mode (reference.md 1.3). None inherits; an explicit zero
is a value and is kept.
"""

from __future__ import annotations

import secrets
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from civetta.types import SamplingOverrides, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.options import SamplingOptions

THINKING = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=0.0)
NOT_THINKING = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, presence_penalty=1.5)

_NAMES = tuple(entry.name for entry in fields(SamplingOverrides))


def random_seed() -> int:
    """Draw a seed for a request that brings none: 64 bits from the operating system."""
    return secrets.randbits(64)


def server_overrides(options: SamplingOptions) -> SamplingOverrides:
    """Read the sampling flags of a server or command as overrides."""
    return SamplingOverrides(**{name: getattr(options, name) for name in _NAMES})


def resolve(
    request: SamplingOverrides,
    server: SamplingOverrides | None = None,
    *,
    thinking: bool,
    logprobs: int | None = None,
    logit_bias: tuple[tuple[int, float], ...] = (),
    draw_seed: Callable[[], int] = random_seed,
) -> SamplingParams:
    """Merge field by field: request, else server, else the preset of the effective thinking mode.

    A seed that neither gives is drawn by `draw_seed`; the result carries it, so that a reply can
    report the seed that repeats it. Ranges are `limits.check_sampling`'s business.
    """
    preset = THINKING if thinking else NOT_THINKING
    values: dict[str, Any] = {}
    for name in _NAMES:
        layers = (getattr(request, name), getattr(server, name) if server else None)
        given = [value for value in layers if value is not None]
        if given:
            values[name] = given[0]
        elif name == "seed":
            values[name] = draw_seed()
        else:
            values[name] = getattr(preset, name)
    return SamplingParams(**values, logprobs=logprobs, logit_bias=logit_bias)
