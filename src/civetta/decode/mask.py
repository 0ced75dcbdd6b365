"""`TokenMask`: which tokens may be chosen from one row of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from civetta.decode.sampler import Floats


@dataclass(frozen=True, slots=True, eq=False)
class TokenMask:
    """One of three: the `only` token, all but `banned_N` (int64 [N]), or `allowed_V` (bool [V])."""

    only: int | None = None
    banned_N: NDArray[np.int64] | None = None
    allowed_V: NDArray[np.bool_] | None = None

    def apply(self, values_V: Floats) -> Floats:
        """A copy of the values, -inf where a token may not be chosen; same dtype."""
        if self.allowed_V is not None:
            masked_V: Floats = np.where(self.allowed_V, values_V, values_V.dtype.type(-np.inf))
            return masked_V
        if self.banned_N is not None:
            masked_V = values_V.copy()
            masked_V[self.banned_N] = -np.inf
            return masked_V
        assert self.only is not None, "a mask says something"
        masked_V = np.full_like(values_V, -np.inf)
        masked_V[self.only] = values_V[self.only]
        return masked_V

    def allows(self, token_id: int) -> bool:
        """Whether the token may be chosen."""
        if self.allowed_V is not None:
            return bool(self.allowed_V[token_id])
        if self.banned_N is not None:
            return token_id not in self.banned_N
        return token_id == self.only
