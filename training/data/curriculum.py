"""How much of each ability, at which sequence lengths, in each phase of the training."""

from __future__ import annotations

from dataclasses import dataclass

from training.data.draw import seeded

Shares = tuple[tuple[str, float], ...]

SHORT: Shares = (
    ("arithmetic", 0.15),
    ("retrieval", 0.12),
    ("copy", 0.09),
    ("vision", 0.17),
    ("tools", 0.15),
    ("json", 0.08),
    ("definitions", 0.08),
    ("stories", 0.12),
    ("chat", 0.04),
)
"""Shares of tokens in rows of up to 1,024 tokens."""

MIDDLE: Shares = (
    ("arithmetic", 0.06),
    ("retrieval", 0.42),
    ("copy", 0.04),
    ("vision", 0.06),
    ("tools", 0.26),
    ("json", 0.04),
    ("definitions", 0.04),
    ("stories", 0.06),
    ("chat", 0.02),
)
"""Shares in rows of up to 4,096 tokens: here eight tools fit."""

LONG: Shares = (
    ("arithmetic", 0.03),
    ("retrieval", 0.78),
    ("copy", 0.02),
    ("vision", 0.03),
    ("tools", 0.06),
    ("json", 0.02),
    ("definitions", 0.02),
    ("stories", 0.03),
    ("chat", 0.01),
)
"""Shares in longer rows."""


SEE: Shares = (("vision", 1.0),)
"""Rows of pictures alone."""

BOTH: Shares = (
    ("arithmetic", 0.09),
    ("retrieval", 0.09),
    ("copy", 0.07),
    ("vision", 0.42),
    ("tools", 0.12),
    ("json", 0.06),
    ("definitions", 0.05),
    ("stories", 0.08),
    ("chat", 0.02),
)
"""Shares in rows of up to 1,024 tokens while pictures are joined to a trained text model."""

COUNT: Shares = (
    ("arithmetic", 0.08),
    ("retrieval", 0.08),
    ("copy", 0.06),
    ("vision", 0.2),
    ("counting", 0.3),
    ("tools", 0.1),
    ("json", 0.05),
    ("definitions", 0.04),
    ("stories", 0.07),
    ("chat", 0.02),
)
"""The same once colours and shapes are known and counting is not."""

PICK: Shares = (
    ("arithmetic", 0.07),
    ("retrieval", 0.07),
    ("copy", 0.06),
    ("vision", 0.14),
    ("counting", 0.07),
    ("picking", 0.28),
    ("tools", 0.13),
    ("json", 0.05),
    ("definitions", 0.04),
    ("stories", 0.07),
    ("chat", 0.02),
)
"""The same once counting all is known and counting some is not."""

BOXES: Shares = (
    ("arithmetic", 0.03),
    ("retrieval", 0.2),
    ("copy", 0.03),
    ("vision", 0.02),
    ("picking", 0.06),
    ("tools", 0.1),
    ("toolbox", 0.46),
    ("json", 0.03),
    ("definitions", 0.02),
    ("stories", 0.04),
    ("chat", 0.01),
)
"""Shares in the rows of that stage in which eight tools fit."""

NAMES: Shares = (
    ("arithmetic", 0.08),
    ("retrieval", 0.07),
    ("copy", 0.07),
    ("vision", 0.14),
    ("counting", 0.04),
    ("picking", 0.10),
    ("tools", 0.16),
    ("json", 0.06),
    ("definitions", 0.06),
    ("stories", 0.19),
    ("chat", 0.03),
)
"""The same once pictures are known; stories with the names asked for."""

EIGHT: Shares = (
    ("arithmetic", 0.03),
    ("retrieval", 0.14),
    ("copy", 0.03),
    ("vision", 0.02),
    ("picking", 0.05),
    ("tools", 0.16),
    ("toolbox", 0.44),
    ("json", 0.03),
    ("definitions", 0.02),
    ("stories", 0.07),
    ("chat", 0.01),
)
"""Shares of that stage in the rows in which eight tools fit."""

PROSE: Shares = (
    ("arithmetic", 0.05),
    ("retrieval", 0.12),
    ("copy", 0.06),
    ("vision", 0.04),
    ("tools", 0.12),
    ("json", 0.08),
    ("definitions", 0.16),
    ("stories", 0.33),
    ("chat", 0.04),
)
"""Shares for the draft head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a batch, and how often it comes compared with the other shapes."""

    seq_len: int
    rows: int
    frequency: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens of one batch, padding included."""
        return self.seq_len * self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One phase: shapes that take turns, shares of the abilities, loss weight of given text."""

    shapes: tuple[Shape, ...]
    context_weight: float = 0.1
    short: Shares = SHORT
    middle: Shares = MIDDLE
    long: Shares = LONG

    def shape_of(self, seed: int, index: int) -> Shape:
        """Return the shape of batch `index`."""
        rng = seeded("shape", seed, index)
        return rng.choices(self.shapes, [shape.frequency for shape in self.shapes])[0]

    def shares_at(self, seq_len: int) -> dict[str, float]:
        """Return the share of each ability, adding up to one."""
        chosen = self.short if seq_len <= 1024 else self.middle if seq_len <= 4096 else self.long
        total = sum(share for _, share in chosen)
        return {name: share / total for name, share in chosen if share > 0}


def plan(phase: str, tokens: int = 65536) -> Plan:
    """Return the plan of a phase; every batch has `tokens` tokens (a multiple of 16,384).

    `start` learns form and short answers; `main` is the bulk; `long` stretches retrieval to 16 k
    and keeps everything else alive. `see` is pictures alone, `both` pictures and text, `count` the same
    with more counting; `pick` the same with counting some and with calls to many tools; `names` has
    more of such calls and of stories about given people; `draft` is for the draft head. Raises
    KeyError for another name.
    """
    frequencies = {
        "start": {512: 0.5, 1024: 0.5},
        "main": {1024: 0.72, 2048: 0.16, 4096: 0.1, 16384: 0.02},
        "long": {1024: 0.4, 2048: 0.15, 4096: 0.2, 16384: 0.25},
        "see": {512: 1.0},
        "both": {512: 0.3, 1024: 0.46, 4096: 0.12, 16384: 0.12},
        "count": {512: 0.3, 1024: 0.52, 4096: 0.1, 16384: 0.08},
        "pick": {512: 0.2, 1024: 0.44, 4096: 0.3, 16384: 0.06},
        "names": {512: 0.1, 1024: 0.34, 4096: 0.49, 16384: 0.07},
        "draft": {1024: 0.8, 4096: 0.2},
    }[phase]
    shapes = tuple(
        Shape(seq_len=length, rows=tokens // length, frequency=frequency)
        for length, frequency in frequencies.items()
    )
    short = {"see": SEE, "both": BOTH, "count": COUNT, "pick": PICK, "names": NAMES, "draft": PROSE}
    middle = {"pick": BOXES, "names": EIGHT}
    return Plan(
        shapes=shapes,
        context_weight=0.2 if phase == "start" else 0.1,
        short=short.get(phase, SHORT),
        middle=middle.get(phase, MIDDLE),
    )
