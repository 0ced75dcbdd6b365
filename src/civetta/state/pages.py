"""Paged keys, values and index keys of the sparse attention layers.

A page holds 64 tokens of every layer. Pages are taken as a sequence grows and are zeroed when taken,
so that rows past a sequence's end are finite (they meet a weight of zero). Memory that no page of
uses is never touched. A page with several owners is not written: `copy` makes one of one's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.errors import EngineBusy
from civetta.kernels.ops import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """Sizes of a page: layers, key/value heads and their width, index width, tokens a block."""

    layers: int
    kv_heads: int
    head_dim: int
    index_dim: int
    index_ratio: int

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page."""
        token = 2 * self.kv_heads * self.head_dim + self.index_dim
        pooled = PAGE_TOKENS // self.index_ratio * self.index_dim
        return self.layers * (PAGE_TOKENS * token + pooled) * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """One layer's share: k, v [P, 64, G, A]; raw index keys [P, 64, X]; pooled [P, 64/ratio, X]."""

    k: Tensor
    v: Tensor
    index_raw: Tensor
    index_key: Tensor


class PagePool:
    """A fixed number of pages; every page is free or held by at least one owner."""

    def __init__(
        self, shape: PageShape, pages: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._owners = [0] * pages
        blocks = PAGE_TOKENS // shape.index_ratio
        kv = (pages, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
        self.layers = tuple(
            LayerPages(
                k=torch.empty(kv, dtype=dtype, device=device),
                v=torch.empty(kv, dtype=dtype, device=device),
                index_raw=torch.empty(
                    (pages, PAGE_TOKENS, shape.index_dim), dtype=dtype, device=device
                ),
                index_key=torch.empty((pages, blocks, shape.index_dim), dtype=dtype, device=device),
            )
            for _ in range(shape.layers)
        )

        self.page_bytes = shape.page_bytes(dtype)

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def owners(self, page: int) -> int:
        """How many hold a page."""
        return self._owners[page]

    def require(self, pages: int) -> None:
        """Raise EngineBusy unless that many pages are free."""
        if pages > len(self._free):
            raise EngineBusy(
                f"{pages} pages of {PAGE_TOKENS} tokens are needed and {len(self._free)} of"
                f" {self.pages} are free; wait for a request to end or start with fewer --sessions"
            )

    def take(self) -> int:
        """A zeroed page with one owner; raises EngineBusy when none is free."""
        return self.take_several(1)[0]

    def take_several(self, count: int) -> list[int]:
        """Zeroed pages with one owner each; raises EngineBusy, with none taken, when too few are free.

        Pages beside each other are zeroed together: a chunk of a prompt takes 64, and a GPU's host
        would launch a fill for each of their 48 parts.
        """
        self.require(count)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        for first, behind in _runs(pages):
            for part in self._parts():
                part[first:behind].zero_()
        return pages

    def copy(self, page: int) -> int:
        """A page with one owner and the contents of another; raises EngineBusy like `take`."""
        self.require(1)
        new = self._free.pop()
        self._owners[new] = 1
        for part in self._parts():
            part[new].copy_(part[page])
        return new

    def read(self, page: int, rows: int) -> Tensor:
        """The first `rows` tokens of a page as uint8 [page_bytes] on the host, zeros behind them.

        Bytes of all layers one after another, each k, v, index_raw, index_key.
        """
        out = torch.zeros(self.page_bytes, dtype=torch.uint8)
        for part, place in self._places(out):
            kept = rows * part.shape[1] // PAGE_TOKENS
            place[:kept].copy_(part[page, :kept])
        return out

    def write(self, page: int, data: Tensor) -> None:
        """Fill a page with one owner from what `read` returned."""
        assert self._owners[page] == 1, "wrote a shared page"
        for part, place in self._places(data):
            part[page].copy_(place)

    def _parts(self) -> Iterator[Tensor]:
        for layer in self.layers:
            yield from (layer.k, layer.v, layer.index_raw, layer.index_key)

    def _places(self, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every tensor of the pool with its page's place in `data`, in its dtype and shape."""
        start = 0
        for part in self._parts():
            stop = start + part[0].nbytes
            yield part, data[start:stop].view(part.dtype).view(part.shape[1:])
            start = stop

    def share(self, page: int) -> None:
        """One more owner for a page in use."""
        assert self._owners[page] > 0, "shared a free page"
        self._owners[page] += 1

    def drop(self, page: int) -> None:
        """One owner less; the last one frees the page."""
        assert self._owners[page] > 0, "dropped a free page"
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self._free.append(page)

    def check(self) -> None:
        """Prove that the books balance: free and held pages are all pages, once each."""
        held = {page for page, owners in enumerate(self._owners) if owners}
        assert all(owners >= 0 for owners in self._owners), "negative owners"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert held.isdisjoint(self._free), "a page is free and held"
        assert len(held) + len(self._free) == self.pages, "a page is lost"


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    """The pages in order of their numbers, as ranges [first, behind)."""
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs
