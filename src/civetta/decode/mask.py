"""`TokenMask`: which tokens may be chosen from one row of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from civetta.decode.sampler import Floats, Ids

FEW = 8
"""A mask that allows less than one token in so many is kept as a list: choosing looks at no others."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenMask:
    """One of three: only `allowed_N` (int64 [N], ascending), all but `banned_N`, or `allowed_V`."""

    allowed_N: Ids | None = None
    banned_N: Ids | None = None
    allowed_V: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, allowed_V: NDArray[np.bool_]) -> TokenMask:
        """The mask of bool [V], in the form that is cheapest to choose with."""
        if np.count_nonzero(allowed_V) * FEW < allowed_V.shape[0]:
            return cls(allowed_N=np.flatnonzero(allowed_V))
        return cls(allowed_V=allowed_V)

    def apply(self, values_V: Floats) -> Floats:
        """A copy of the values, -inf where a token may not be chosen; same dtype."""
        if self.allowed_V is not None:
            masked_V: Floats = np.where(self.allowed_V, values_V, values_V.dtype.type(-np.inf))
            return masked_V
        if self.banned_N is not None:
            masked_V = values_V.copy()
            masked_V[self.banned_N] = -np.inf
            return masked_V
        assert self.allowed_N is not None, "a mask says something"
        masked_V = np.full_like(values_V, -np.inf)
        masked_V[self.allowed_N] = values_V[self.allowed_N]
        return masked_V

    def allows_each(self, ids_N: Ids) -> NDArray[np.bool_]:
        """Which of some tokens may be chosen: bool [N]."""
        if self.allowed_V is not None:
            return self.allowed_V[ids_N]
        if self.banned_N is not None:
            return np.isin(ids_N, self.banned_N, invert=True)
        assert self.allowed_N is not None, "a mask says something"
        return np.isin(ids_N, self.allowed_N)

    def allows(self, token_id: int) -> bool:
        """Whether the token may be chosen."""
        if self.allowed_V is not None:
            return bool(self.allowed_V[token_id])
        if self.banned_N is not None:
            return token_id not in self.banned_N
        return self.allowed_N is not None and token_id in self.allowed_N
