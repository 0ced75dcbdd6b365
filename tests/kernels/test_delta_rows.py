"""The gated delta rule over few rows gives the bits of one launch of many, wherever chunks begin.

In the interpreter with sums in one order, which numpy's products do not have (it hangs on the shape).
What the compiled kernels do on a GPU: benchmarks/gpu_long.py.
"""

import pytest
import torch
from triton_inputs import DEVICE, Random

pytest.importorskip("triton")

import numpy as np
from triton.runtime import interpreter

from civetta.kernels.fused.delta import DeltaPlaces, DeltaSizes, delta
from civetta.kernels.fused.launch import ROW_FIELDS, SESSION_FIELDS, Batch
from civetta.state.device_state import DeviceState
from civetta.state.recurrent import REWIND_ROWS, RecurrentShape

SHAPE = RecurrentShape(
    layers=1, key_heads=1, value_heads=2, head_dim=16, channels=64, conv_rows=3, ple_rows=0,
    ple_width=0,
)  # fmt: skip
ROWS = 140
EPS = 1e-6


class InOrder:
    """numpy, but products add their terms from the first to the last, and exp is rounded once."""

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def exp(x, **_):
        return np.exp(np.asarray(x, np.float64)).astype(np.asarray(x).dtype)

    @staticmethod
    def matmul(a, b, dtype=None):
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype or np.float32)
        for k in range(a.shape[-1]):
            total += a[..., :, k, None] * b[..., None, k, :]
        return total


@pytest.fixture(autouse=True)
def _sums_in_order(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "np", InOrder())


class Rule:
    """One layer with its weights, the rows of two sequences, and where both stand."""

    def __init__(self, dtype, whole):
        random = Random(5)
        draw = random.whole if whole else random.normal
        channels, heads = SHAPE.channels, SHAPE.value_heads
        self.dtype = dtype
        self.rows = [
            (
                draw(ROWS, channels).to(dtype).to(DEVICE),
                draw(ROWS, heads * SHAPE.head_dim).to(dtype).to(DEVICE),
                draw(ROWS, 2 * heads).to(DEVICE),
            )
            for _ in range(2)
        ]
        self.weights = (
            draw(channels, 4).to(DEVICE),
            -0.1 * random.uniform(heads).to(DEVICE),
            draw(heads).to(DEVICE),
            draw(SHAPE.head_dim).to(DEVICE),
        )
        self.states = [DeviceState(SHAPE, dtype, torch.device(DEVICE)) for _ in range(2)]
        self.positions = [0, 0]

    def launch(self, counts):
        """The next counts[i] rows of each sequence in one launch; what they come out as."""
        layout = self.states[0].layout
        places = DeltaPlaces(
            **{name: part.at for name, part in layout.gdn[0].items() if name != "s"},
            state=layout.gdn[0]["s"].at,
        )
        sizes = DeltaSizes(
            key_heads=SHAPE.key_heads, value_heads=SHAPE.value_heads, width=SHAPE.head_dim, taps=4,
            ring=layout.conv_ring, tiled=True,
        )  # fmt: skip
        inputs = [
            torch.cat([rows[i][at : at + n] for rows, at, n in self._spans(counts)])
            for i in range(3)
        ]
        y = delta(self._batch(counts), sizes, places, *inputs, *self.weights, EPS)
        for i, n in enumerate(counts):
            self.positions[i] += n
            self.states[i].base = self.states[i].base_after(self.positions[i])
        return y.split(list(counts))

    def kept(self, i):
        """All that sequence i carries on, as bytes."""
        parts = self.states[i].parts(self.positions[i])
        return {name: part.contiguous().view(torch.uint8) for name, part in parts.items()}

    def _spans(self, counts):
        return zip(self.rows, self.positions, counts, strict=True)

    def _batch(self, counts):
        rows, sessions, start = [], [], 0
        for i, n in enumerate(counts):
            at, state = self.positions[i], self.states[i]
            fields = {
                "first_row": start,
                "rows": n,
                "first": at,
                "base": state.base,
                "new_base": state.base_after(at + n),
                "state": state.address,
            }
            sessions.append([fields.get(name, 0) for name in SESSION_FIELDS])
            values = {"session": i}
            rows += [
                [values.get(name, at + j if name == "position" else 0) for name in ROW_FIELDS]
                for j in range(n)
            ]
            start += n
        most = max(counts)
        return Batch(
            rows_FT=torch.tensor(rows, dtype=torch.int64).t().contiguous().to(DEVICE),
            sessions_FB=torch.tensor(sessions, dtype=torch.int64).t().contiguous().to(DEVICE),
            rows=start,
            sessions=len(counts),
            most_rows=most,
            in_place=most <= REWIND_ROWS,
            table_tokens=1024,
            counts=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )


CUTS = ((52, 121), (8, 1), (1, 5), (2, 1), (1, 8), (8, 1), (1, 2), (2, 1))
"""Rows of each sequence in launch after launch: many, or at most 8. The first passes the end of a
chunk (64) and the position where the state moves on (72) in launches of few rows, the second those of
the chunk after (128, 136)."""


@pytest.mark.parametrize(("dtype", "whole"), [(torch.float32, False), (torch.float16, True)])
def test_few_rows_give_the_bits_of_many(dtype, whole):
    rows = [sum(counts) for counts in zip(*CUTS, strict=True)]
    many, few = Rule(dtype, whole), Rule(dtype, whole)
    want = many.launch(tuple(rows))
    got = [torch.cat(ys) for ys in zip(*(few.launch(counts) for counts in CUTS), strict=True)]
    for i in range(2):
        assert want[i].isfinite().all()
        assert want[i].abs().max() > 0.1
        assert torch.equal(got[i], want[i])
        one, other = many.kept(i), few.kept(i)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_the_cuts_meet_what_they_are_for():
    """Launches of few rows that end, begin or cross at each place, in both sequences."""
    for i, places in enumerate(((64, 72), (128, 136))):
        ends = [sum(counts[i] for counts in CUTS[: n + 1]) for n in range(len(CUTS))]
        few = [(end - cut[i], end) for cut, end in zip(CUTS, ends, strict=True) if cut[i] <= 8]
        for place in places:
            assert any(start < place <= stop for start, stop in few)
            assert any(start >= place for start, _ in few)
