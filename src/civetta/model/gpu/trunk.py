"""`GpuTrunk`: the text model on a GPU, through fused kernels and, for few rows, captured graphs.

The host writes two small tables a launch (kernels/fused/launch.py) and copies them in one go; no
kernel argument depends on what is in them. So a launch of the same size, whatever its sequences and
positions, is a replay: a graph up to the n-gram layer, its rows, then graphs of a few layers each. The
first launch of a size runs kernel by kernel, which compiles them; the second is captured.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from civetta.errors import UsageError
from civetta.kernels.fused.launch import ROW_FIELDS, SESSION_FIELDS, Batch
from civetta.kernels.matmul.triton import counters
from civetta.kernels.shortlist.triton import shortlists
from civetta.model.gpu.layers import GpuLayers
from civetta.model.gpu.scratch import launch_bytes
from civetta.model.inputs import Span, Wanted
from civetta.model.rope import rope_positions
from civetta.model.trunk import Trunk, _lay_images, state_shape
from civetta.state.device_state import DeviceState
from civetta.state.recurrent import REWIND_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from civetta.kernels.ops import Ops
    from civetta.model.config import ModelConfig
    from civetta.model.gpu.layers import Progress
    from civetta.model.gpu.weights import GpuWeights
    from civetta.model.inputs import Piece, RowSource, RowTicket
    from civetta.model.mtp import MtpHead
    from civetta.model.weights import TrunkWeights
    from civetta.state.pages import PagePool
    from civetta.state.session import StateShape

GRAPH_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
GRAPH_ROWS = GRAPH_SIZES[-1]
GRAPHS_KEPT = 48
GRAPH_LAYERS = 8
"""Layers of a graph: while it runs, the host launches the next one."""
LEAST_TABLE_TOKENS = 4096


class GpuTrunk(Trunk):
    """The text model on a GPU. Uses one stream, the current one."""

    def __init__(
        self,
        config: ModelConfig,
        stored: TrunkWeights | None,
        weights: GpuWeights,
        ops: Ops,
        dtype: torch.dtype,
        rows: RowSource | None,
        head: MtpHead | None = None,
        *,
        device: torch.device,
        graphs: bool = True,
    ) -> None:
        super().__init__(
            config, cast("TrunkWeights", stored), ops, dtype, rows, head, device=device
        )
        shape = state_shape(config, has_head=head is not None)
        self._layers = GpuLayers(config, weights, shape.recurrent, dtype, device)
        self._counts = counters(device)
        self._graphs = Graphs() if graphs and device.type == "cuda" else None

    @property
    def state_shape(self) -> StateShape:
        """Sizes of a session's state, which kernels find by address."""
        return replace(super().state_shape, addressed=True)

    @property
    def shortlists(self) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
        """Lists the best tokens of rows of logits on the device."""
        return shortlists

    def launch_bytes(self, rows: int, context_tokens: int) -> int:
        """Memory that a launch of so many rows allocates and frees again."""
        return launch_bytes(self.config, rows, context_tokens, self.dtype)

    def forget_graphs(self) -> None:
        """Give back the memory of captured launches, and the pages that they read."""
        if self._graphs is not None:
            self._graphs = Graphs()

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Launches run kernel by kernel while the block runs."""
        graphs, self._graphs = self._graphs, None
        try:
            yield
        finally:
            self._graphs = graphs

    def over(self, ops: Ops, around: Callable[[RowSource], RowSource]) -> Trunk:  # noqa: ARG002
        """Raises UsageError: the fused kernels are no table of ops."""
        raise UsageError(
            "--phases times single ops, which a GPU does not run: --profile lists its kernels."
        )

    def _compute(self, pieces: Sequence[Piece], tickets: Sequence[RowTicket]) -> Tensor:
        spans = _spans(pieces)
        wanted = Wanted.of(pieces, spans).rows_N
        size = _size(spans, self._with_images(pieces, spans))
        graph = (
            None
            if self._graphs is None or not size.small
            else self._graphs.find(size, self.device, self._counts)
        )
        if graph is None:
            logits, x_TSD, inputs_TD = self._launch(pieces, spans, size, tickets, wanted)
        else:
            graph.tables.fill(spans, pieces)
            self._replay(graph, spans, tickets, pieces)
            logits, x_TSD = _picked(graph.logits, wanted, spans[-1].stop), graph.x_TSD
            inputs_TD = x_TSD[:0, 0]  # read for images alone
        for piece, span in zip(pieces, spans, strict=True):
            session = span.session
            session.extend([int(i) for i in piece.ids], None)
            session.recurrent.base = session.recurrent.base_after(session.position)
        if self.head is not None:
            self.head.follow(spans, x_TSD, inputs_TD)
        return logits

    def _with_images(self, pieces: Sequence[Piece], spans: Sequence[Span]) -> bool:
        """Whether rows of images take the place of embeddings in this launch."""
        return any(
            max(image.start, span.first) < min(image.stop, span.first + span.stop - span.start)
            for piece, span in zip(pieces, spans, strict=True)
            for image in piece.session.images
        )

    def _launch(
        self,
        pieces: Sequence[Piece],
        spans: Sequence[Span],
        size: _Size,
        tickets: Sequence[RowTicket],
        wanted_N: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Kernel by kernel: logits of the wanted rows, the streams of all, and, where images are
        among them, what the first layer read."""
        tables = Tables(size, self.device, self._counts)
        tables.fill(spans, pieces)
        layers, batch, pool = self._layers, tables.batch, spans[0].session.pool
        at = layers.begin(batch)
        if size.images:
            for piece, span in zip(pieces, spans, strict=True):
                for stream in at.x_TSD[span.part].unbind(1):
                    _lay_images(stream, piece, span.first, self.dtype)
        inputs_TD = at.x_TSD[:, 0].clone() if size.images else at.x_TSD[:0, 0]
        at = layers.run(batch, at, pool, 0, layers.ngram_at)
        if self.config.ple is not None:
            rows_TE = self._ngram_rows(tickets, pieces)
            at = layers.ngram(batch, at, _padded(rows_TE, size.rows))
        at = layers.run(batch, at, pool, layers.ngram_at)
        everything = len(wanted_N) == size.rows == spans[-1].stop
        picked = None if everything else wanted_N.to(self.device)
        logits = layers.finish(at, picked, self._counts)
        return logits, at.x_TSD, inputs_TD

    def _replay(
        self,
        graph: Captured,
        spans: Sequence[Span],
        tickets: Sequence[RowTicket],
        pieces: Sequence[Piece],
    ) -> None:
        """All graphs of a size; captures them first if that was not done."""
        pool = spans[0].session.pool
        if not graph.behind or graph.pages is not pool:
            self._capture(graph, pool)
        if graph.before is not None:
            graph.before.replay()
            rows_TE = self._ngram_rows(tickets, pieces)
            graph.rows_TE[: len(rows_TE)].copy_(rows_TE)
        for part in graph.behind:
            part.replay()

    def _capture(self, graph: Captured, pool: PagePool) -> None:
        layers, batch, c = self._layers, graph.tables.batch, self.config
        assert self._graphs is not None
        width = 0 if c.ple is None else c.ple.embed
        graph.rows_TE = torch.zeros((batch.rows, width), dtype=self.dtype, device=self.device)
        graph.logits = torch.zeros((batch.rows, c.vocab), device=self.device)
        graph.pages = pool
        at: Progress | None = None
        if c.ple is not None:
            graph.before = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph.before, pool=self._graphs.memory):
                at = layers.run(batch, layers.begin(batch), pool, 0, layers.ngram_at)
        graph.behind = []
        for start in range(layers.ngram_at, c.layers, GRAPH_LAYERS):
            stop = min(start + GRAPH_LAYERS, c.layers)
            graph.behind.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graph.behind[-1], pool=self._graphs.memory):
                if at is None:
                    at = layers.begin(batch)
                elif start == layers.ngram_at:
                    at = layers.ngram(batch, at, graph.rows_TE)
                at = layers.run(batch, at, pool, start, stop)
                if stop == c.layers:
                    layers.finish(at, None, self._counts, graph.logits)
        assert at is not None
        graph.kept = at
        graph.x_TSD = at.x_TSD


@dataclass(frozen=True, slots=True)
class _Size:
    """What a launch's grids depend on; launches of one size share a graph."""

    rows: int
    sessions: int
    most_rows: int
    in_place: bool
    table_tokens: int
    images: bool

    @property
    def small(self) -> bool:
        """Whether a graph may serve it."""
        return self.in_place and self.rows <= GRAPH_ROWS and not self.images


class Tables:
    """A launch's tables on the host and on the device."""

    def __init__(self, size: _Size, device: torch.device, counts: Tensor) -> None:
        rows, sessions = size.rows, size.sessions
        row_values, session_values = len(ROW_FIELDS) * rows, len(SESSION_FIELDS) * sessions
        cuda = device.type == "cuda"
        self._host = torch.zeros(row_values + session_values, dtype=torch.int64, pin_memory=cuda)
        self._device = torch.zeros_like(self._host, device=device)
        self._copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self._rows_FT = self._host[:row_values].view(len(ROW_FIELDS), rows).numpy()
        self._sessions_FB = self._host[row_values:].view(len(SESSION_FIELDS), sessions).numpy()
        self.batch = Batch(
            rows_FT=self._device[:row_values].view(len(ROW_FIELDS), rows),
            sessions_FB=self._device[row_values:].view(len(SESSION_FIELDS), sessions),
            rows=rows,
            sessions=sessions,
            most_rows=size.most_rows,
            in_place=size.in_place,
            table_tokens=size.table_tokens,
            counts=counts,
        )

    def fill(self, spans: Sequence[Span], pieces: Sequence[Piece]) -> None:
        """Write what this launch is about, and send it to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before may not have read the host's side yet
        rows, sessions = self._rows_FT, self._sessions_FB
        rows[:] = 0
        rows[ROW_FIELDS.index("session")] = -1
        for i, (span, piece) in enumerate(zip(spans, pieces, strict=True)):
            session, count = span.session, span.stop - span.start
            places = np.arange(span.first, span.first + count)
            part = rows[:, span.part]
            part[0], part[1] = places, i
            part[2:5] = places
            if session.images:
                part[2:5] = rope_positions(session.images, span.first, count).numpy()
            part[5] = piece.ids
            state = session.recurrent
            assert isinstance(state, DeviceState)
            rope_3N = session.rope_room(span.first + count)
            sessions[:, i] = (
                span.start,
                count,
                span.first,
                state.base,
                state.base_after(span.first + count),
                state.address,
                session.table_P().data_ptr(),
                rope_3N.data_ptr(),
                rope_3N.shape[1],
            )
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Captured:
    """Graphs of one size with the memory that they read and write; empty until captured."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.before: torch.cuda.CUDAGraph | None = None  # up to the n-gram layer
        self.behind: list[torch.cuda.CUDAGraph] = []
        self.pages: PagePool | None = None
        self.kept: Progress | None = None
        self.rows_TE = self.logits = self.x_TSD = torch.zeros(0)


class Graphs:
    """Captured launches by size, the least used ones forgotten; `find` counts a size's first use."""

    def __init__(self) -> None:
        self.memory = torch.cuda.graph_pool_handle()
        self._seen: set[_Size] = set()
        self._found: OrderedDict[_Size, Captured] = OrderedDict()

    def find(self, size: _Size, device: torch.device, counts: Tensor) -> Captured | None:
        """The graphs of a size; None the first time, which compiles the kernels it needs."""
        if size not in self._seen:
            self._seen.add(size)
            return None
        if size not in self._found:
            self._found[size] = Captured(Tables(size, device, counts))
            if len(self._found) > GRAPHS_KEPT:
                self._found.popitem(last=False)
        self._found.move_to_end(size)
        return self._found[size]


def _spans(pieces: Sequence[Piece]) -> tuple[Span, ...]:
    """Where the pieces lie; their rope positions reach the device with the tables."""
    spans, start = [], 0
    for piece in pieces:
        session, stop = piece.session, start + len(piece.ids)
        assert stop > start, "an empty piece"
        known_3N = session.rope_room(session.position + len(piece.ids))
        spans.append(
            Span(session=session, start=start, stop=stop, first=session.position, known_3N=known_3N)
        )
        start = stop
    return tuple(spans)


def _size(spans: Sequence[Span], images: bool) -> _Size:
    counts = [span.stop - span.start for span in spans]
    rows, most = sum(counts), max(counts)
    in_place = most <= REWIND_ROWS
    longest = max(span.first + count for span, count in zip(spans, counts, strict=True))
    if in_place and rows <= GRAPH_ROWS and not images:
        rows = next(n for n in GRAPH_SIZES if n >= rows)
        most = next(n for n in (1, 2, 4, REWIND_ROWS) if n >= most)
    return _Size(
        rows=rows,
        sessions=len(spans),
        most_rows=most,
        in_place=in_place,
        table_tokens=max(LEAST_TABLE_TOKENS, 1 << (longest - 1).bit_length()),
        images=images,
    )


def _padded(rows_TE: Tensor, rows: int) -> Tensor:
    """Zeros for the rows that only fill a launch up."""
    missing = rows - len(rows_TE)
    return torch.nn.functional.pad(rows_TE, (0, 0, 0, missing)) if missing else rows_TE


def _picked(logits: Tensor, wanted_N: Tensor, rows: int) -> Tensor:
    """A copy of the wanted rows: the next launch of the size writes over them."""
    if len(wanted_N) == rows:
        return logits[:rows].clone()
    return logits[wanted_N.to(logits.device)]
