"""Names of the mixtures of stored types that random weights come in; no torch."""

from __future__ import annotations

from typing import Literal

Mix = Literal["q4_k_xl", "q8_0", "fp8", "bf16"]
"""Stored types of random weights, named after the published files that have them."""

MIXES: tuple[Mix, ...] = ("q4_k_xl", "q8_0", "fp8", "bf16")
