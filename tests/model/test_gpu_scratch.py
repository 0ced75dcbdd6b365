"""Memory of a launch on a GPU: the sums of the plan against the tensors that launches make.

The real sizes, on torch's meta device, where tensors have no contents: kernels are not run, and every
tensor that is made is counted until it is gone.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from civetta.kernels.gpu import gpu_ops
from civetta.model.gpu.random import flash_next_config, random_weights, weight_bytes
from civetta.model.gpu.trunk import GpuTrunk

META = torch.device("meta")
GIB = 1 << 30
ROUND_BYTES = 512
"""What torch's allocator rounds a tensor up to."""


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors on the meta device; `most` is the most at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.device == META:
                self._count(x.untyped_storage())
        return made

    def _count(self, storage):
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = -(-storage.nbytes() // ROUND_BYTES) * ROUND_BYTES
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self._known.discard(key)
        self.now -= size

    @contextmanager
    def added(self):
        """A list that holds, after the block, the most bytes that it added at one time."""
        before, found = self.now, []
        self.most = before
        yield found
        found.append(self.most - before)


class NoRows:
    """An n-gram table whose rows are made elsewhere."""

    def begin(self, *_):
        return self

    def cancel(self):
        pass


@pytest.fixture
def no_kernels(monkeypatch):
    """Kernels are not launched, and random numbers not drawn."""

    def empty(*size, device=None, dtype=None, **_):
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return torch.empty(size, device=device, dtype=dtype)

    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "__getitem__", lambda *_: lambda *_, **__: None)
    for name in ("randn", "rand"):
        monkeypatch.setattr(torch, name, empty)
    monkeypatch.setattr(torch, "randint", lambda _, size, **more: empty(size, **more))
    monkeypatch.setattr(torch, "Generator", Drawn)


class Drawn:
    """A generator by its device alone."""

    def __init__(self, device):
        self.device = device

    def manual_seed(self, _):
        return self


def trunk_of(config, dtype):
    weights = random_weights(config, "q4_k_xl", META)
    trunk = GpuTrunk(config, None, weights, gpu_ops(), dtype, NoRows(), device=META, graphs=False)
    width = config.ple.embed
    trunk._ngram_rows = lambda _, pieces: torch.empty(
        (sum(len(p.ids) for p in pieces), width), dtype=dtype, device=META
    )
    return trunk


def session_before_its_end(store, rows):
    """A session whose last `rows` tokens are to come."""
    session, depth = store.open(), store.pool.pages * 64 - rows
    session.reserve(depth)
    session.rope_room(depth)
    session.extend([1] * depth, None)
    session.recurrent.base = session.recurrent.base_after(depth)
    return session


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_launch_takes_what_the_plan_says(no_kernels, dtype):
    """At most that, and at least nine tenths of it where it is large; chunks of the whole context."""
    config, held = flash_next_config(4, 1000), Held()
    with held, torch.inference_mode():
        trunk = trunk_of(config, dtype)
        store = trunk.store(sessions=1, context_tokens=config.context_tokens)
        for rows in (1, 64, 512, 2048, 4096):
            session = session_before_its_end(store, rows)
            with held.added() as most:
                trunk.forward(session, [1] * rows)
            planned = trunk.launch_bytes(rows, config.context_tokens)
            assert most[0] <= planned
            assert rows < 2048 or most[0] > 0.9 * planned
            session.close()


def test_a_session_of_the_whole_context_fits_in_eight_gib_beside_the_weights(no_kernels):
    """Issue bound; and a chunk of 4,096 adds at most 1.4 GiB to one of 2,048."""
    config, held = flash_next_config(48, 1000), Held()
    with held, torch.inference_mode():
        trunk = trunk_of(config, torch.float16)
        weights = held.now
        assert abs(weight_bytes(trunk._layers.weights) / weights - 1) < 0.01
        store = trunk.store(sessions=1, context_tokens=config.context_tokens)
        most = {}
        for rows in (2048, 4096):
            session = session_before_its_end(store, rows)
            with held.added() as found:
                trunk.forward(session, [1] * rows)
            most[rows] = found[0]
            assert held.now - weights + found[0] < 8 * GIB
            session.close()
        assert most[4096] - most[2048] < 1.4 * GIB
    del session, store, trunk
    gc.collect()
    assert held.now < weights / 1000  # the count itself: what is gone is not held
