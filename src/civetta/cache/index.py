"""Radix tree over symbols (keys.py): which kept states share how much with a prompt. No torch.

A node stands for a prefix; states are attached to the node of exactly their tokens. Nodes outlive
their states: they tell a prefix whose state had to go from one that was never seen, and where
traffic parts. What is remembered of that is bounded, the least recently met goes first. Each node
knows how many states are at and below it, so that what is only remembered costs no search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from civetta.cache.keys import common_symbols

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Symbols = NDArray[np.int64]


NODE_SYMBOLS = 64
"""A node takes as much memory as so many symbols, beside those of its edge."""

FORGET_SHARE = 4
"""One part in so many goes at once when the bound is reached: finding the oldest is a long walk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the tree knows of a prompt.

    `common` symbols agree with something seen, `extends` when that ended there (nothing seen goes
    on differently). `reachable`: states below and beside the prompt's path as (entry, symbols of
    the state that the prompt shares), in no order. `lost_depths`: where states used to be on the
    path; `lost_s`: when the deepest of them was last used. `image_differs`: at `common`, both go
    on with an image, or one with an image.
    """

    common: int
    extends: bool
    reachable: tuple[tuple[int, int], ...]
    lost_depths: tuple[int, ...]
    lost_s: float | None
    image_differs: bool


class _Node:
    __slots__ = ("children", "depth", "edge", "entry", "lost_s", "met", "parent", "states")

    def __init__(self, parent: _Node | None, edge: Symbols) -> None:
        self.parent, self.edge = parent, edge
        self.depth: int = (parent.depth if parent else 0) + len(edge)
        self.children: dict[int, _Node] = {}
        self.entry: int | None = None
        self.lost_s: float | None = None
        self.met = 0
        self.states = 0  # at and below this node

    @property
    def weight(self) -> int:
        """What it takes, in symbols."""
        return NODE_SYMBOLS + len(self.edge)


class RadixIndex:
    """States by their symbols.

    `remember` bounds what is kept of prefixes that lead to no state, in symbols of 8 bytes.
    """

    def __init__(self, *, reach: int, remember: int = 1 << 22) -> None:
        """`reach`: a state that many symbols beyond what a prompt shares is still of use."""
        self._root = _Node(None, np.zeros(0, dtype=np.int64))
        self._nodes: dict[int, _Node] = {}
        self._reach, self._remember = reach, remember
        self._turn = 0
        self._remembered = self._root.weight  # of the nodes without a state at or below them

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, entry: int) -> bool:
        return entry in self._nodes

    @property
    def remembered(self) -> int:
        """What is kept of prefixes that lead to no state, in symbols."""
        return self._remembered

    def insert(self, key: Symbols, entry: int) -> None:
        """Attach a state; its place must be free."""
        node = self._place(key)
        assert node.entry is None, "two states of one prefix"
        node.entry, node.lost_s = entry, None
        self._nodes[entry] = node
        for step in (node, *_ancestors(node)):
            if not step.states:
                self._remembered -= step.weight
            step.states += 1
        self._forget()

    def at(self, key: Symbols) -> int | None:
        """The state of exactly this prefix, if there is one."""
        node, shared, within = self._walk(key)
        return node.entry if shared == len(key) and within == 0 else None

    def remove(self, entry: int, *, used_s: float) -> None:
        """Detach a state, last used at `used_s`; its prefix is remembered for a while."""
        node = self._nodes.pop(entry)
        node.entry, node.lost_s = None, used_s
        for step in (node, *_ancestors(node)):
            step.states -= 1
            if not step.states:
                self._remembered += step.weight
        self._forget()

    def parent_entry(self, entry: int) -> int | None:
        """The deepest state on the way to this one."""
        node = self._nodes[entry].parent
        while node is not None and node.entry is None:
            node = node.parent
        return None if node is None else node.entry

    def lineages(self, entry: int) -> int:
        """How many ways on from this state lead to other states: 0 at the end of a conversation."""
        return sum(child.states > 0 for child in self._nodes[entry].children.values())

    def depth(self, entry: int) -> int:
        """Symbols of a state."""
        return self._nodes[entry].depth

    def match(self, key: Symbols) -> Match:
        """What is known of a prompt; marks its path as met."""
        node, common, within = self._walk(key)
        self._turn += 1
        path = [node, *_ancestors(node)]
        for step in path:
            step.met = self._turn
        reachable = self._reachable(node, within, key)
        onward = [int(child.edge[0]) for child in node.children.values()]
        if within:
            onward = [int(node.children[_first(key, node.depth)].edge[within])]
        here = int(key[common]) if common < len(key) else 0
        lost = [(step.depth, step.lost_s) for step in path if step.lost_s is not None]
        return Match(
            common=common,
            extends=not onward,
            reachable=tuple(reachable),
            lost_depths=tuple(depth for depth, _ in lost),
            lost_s=max(lost)[1] if lost else None,
            image_differs=common < len(key) and bool(onward) and min([here, *onward]) < 0,
        )

    def check(self) -> None:
        """Prove that the tree is one."""
        found, remembered = {}, 0
        for node in _subtree(self._root):
            below = sum(child.states for child in node.children.values())
            assert node.states == below + (node.entry is not None), "states do not add up"
            remembered += 0 if node.states else node.weight
            if node.entry is not None:
                found[node.entry] = node
            for first, child in node.children.items():
                assert child.parent is node, "a child with another parent"
                assert int(child.edge[0]) == first, "a child under a wrong symbol"
                assert child.depth == node.depth + len(child.edge), "a depth does not add up"
        assert found == self._nodes, "states in the tree and in the table differ"
        assert remembered == self._remembered, "what is remembered does not add up"
        assert remembered <= self._remember, "more is remembered than the bound"

    # ---- walking -------------------------------------------------------------------------------

    def _walk(self, key: Symbols) -> tuple[_Node, int, int]:
        """The deepest node on the way, symbols shared, and how far into the next edge that is."""
        node = self._root
        while node.depth < len(key):
            child = node.children.get(_first(key, node.depth))
            if child is None:
                break
            shared = common_symbols(child.edge, key[node.depth :])
            if shared < len(child.edge):
                return node, node.depth + shared, shared
            node = child
        return node, node.depth, 0

    def _reachable(self, node: _Node, within: int, key: Symbols) -> Iterator[tuple[int, int]]:
        """States on the path, and those at most `reach` symbols off it."""
        came_from: _Node | None = None
        if within:
            came_from = node.children[_first(key, node.depth)]
            common = node.depth + within
            for entry in _near(came_from, common + self._reach):
                yield entry, common
        for step in (node, *_ancestors(node)):
            if step.entry is not None:
                yield step.entry, step.depth
            for child in step.children.values():
                if child.states and child is not came_from:
                    for entry in _near(child, step.depth + self._reach):
                        yield entry, step.depth
            came_from = step

    def _place(self, key: Symbols) -> _Node:
        """The node of exactly this prefix, made where there is none."""
        node, shared, within = self._walk(key)
        if within:
            node = self._split(node.children[_first(key, node.depth)], within)
        if shared < len(key):
            child = _Node(node, key[shared:].copy())
            node.children[int(child.edge[0])] = child
            self._remembered += child.weight
            node = child
        self._turn += 1
        node.met = self._turn
        return node

    def _split(self, child: _Node, within: int) -> _Node:
        parent = child.parent
        assert parent is not None
        middle = _Node(parent, child.edge[:within].copy())
        parent.children[int(middle.edge[0])] = middle
        child.parent, child.edge = middle, child.edge[within:].copy()
        middle.children[int(child.edge[0])] = child
        middle.met, middle.states = child.met, child.states
        if not middle.states:
            self._remembered += NODE_SYMBOLS
        return middle

    def _forget(self) -> None:
        """When the bound is reached, drop the longest-unmet leaves that lead to no state."""
        if self._remembered <= self._remember:
            return
        enough = self._remember - self._remember // FORGET_SHARE
        idle = sorted(
            (node for node in _subtree(self._root) if not (node.states or node.children)),
            key=lambda node: node.met,
        )
        for leaf in idle:
            node: _Node | None = leaf
            while node is not None and node.parent and not (node.states or node.children):
                del node.parent.children[int(node.edge[0])]
                self._remembered -= node.weight
                node = node.parent
            if self._remembered <= enough:
                return


def _first(key: Symbols, at: int) -> int:
    return int(key[at])


def _ancestors(node: _Node) -> Iterator[_Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _subtree(node: _Node) -> Iterator[_Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _near(node: _Node, deepest: int) -> Iterator[int]:
    """States at and below a node down to a depth."""
    stack = [node] if node.depth <= deepest else []
    while stack:
        step = stack.pop()
        if step.entry is not None:
            yield step.entry
        stack.extend(c for c in step.children.values() if c.states and c.depth <= deepest)
