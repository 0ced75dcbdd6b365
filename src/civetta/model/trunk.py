"""The network: embedding, blocks around the n-gram layer, mixing of the streams, head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.kernels.ops import PAGE_TOKENS
from civetta.model.gdn import gdn
from civetta.model.inputs import Piece, Rows, Span, Wanted
from civetta.model.moe import moe
from civetta.model.ple import ple
from civetta.model.qsa import qsa
from civetta.model.rope import RopeTable, rope_positions
from civetta.model.weights import GdnWeights
from civetta.state.pages import PageShape
from civetta.state.recurrent import RecurrentShape
from civetta.state.session import Session, SessionStore, StateShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from civetta.kernels.ops import Ops
    from civetta.model.config import ModelConfig
    from civetta.model.inputs import RowSource, RowTicket
    from civetta.model.mtp import MtpHead
    from civetta.model.weights import BlockWeights, PleWeights, TrunkWeights


class Trunk:
    """The text model: weights, ops, the n-gram table and the draft head, if one is loaded.

    Holds no state of any sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: TrunkWeights,
        ops: Ops,
        dtype: torch.dtype,
        rows: RowSource | None,
        head: MtpHead | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.weights, self.ops, self.dtype = config, weights, ops, dtype
        self.device = device or torch.device("cpu")
        self.head = head
        self._rows = rows
        self._rope = RopeTable(
            config.rope_dims, config.rope_theta, config.mrope_section, self.device
        )
        kinds = config.layer_kinds
        self._index = tuple(kinds[:i].count(kind) for i, kind in enumerate(kinds))

    def over(self, ops: Ops, around: Callable[[RowSource], RowSource]) -> Trunk:
        """The same network with other ops and its table behind `around`; without a draft head."""
        rows = None if self._rows is None else around(self._rows)
        return Trunk(self.config, self.weights, ops, self.dtype, rows, device=self.device)

    @property
    def state_shape(self) -> StateShape:
        """Sizes of a session's state."""
        return state_shape(self.config, has_head=self.head is not None)

    def store(
        self, *, sessions: int, context_tokens: int, pages: int | None = None
    ) -> SessionStore:
        """State for `sessions` sequences of up to `context_tokens` tokens.

        They share `pages` pages; left out, as many as all of them at full length need.
        """
        whole = sessions * -(-context_tokens // PAGE_TOKENS)
        return SessionStore(
            self.state_shape,
            spare_pages=0 if pages is None else pages - whole,
            sessions=sessions,
            context_tokens=context_tokens,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(
        self,
        session: Session,
        ids: Sequence[int],
        rows: Rows = "last",
        next_ids: Sequence[int] = (),
    ) -> Tensor:
        """Append `ids` to one session; float32 logits of the wanted rows [n, vocab]."""
        return self.forward_pieces([Piece(session=session, ids=ids, rows=rows, next_ids=next_ids)])

    def expect(self, session: Session, ids: Sequence[int]) -> None:
        """Read ahead the n-gram rows of tokens that the session's next piece will begin with.

        For a prompt that was admitted, a token that was sampled, drafts; being wrong costs reads.
        """
        if self._rows is not None:
            self._rows.prefetch(ids, self._history(session.ids))

    @property
    def shortlists(self) -> Callable[[Tensor, Tensor, Tensor, int], Tensor] | None:
        """What lists the best tokens of rows of logits (kernels/shortlist); None where the rows are
        in the host's memory."""
        return None

    def launch_bytes(self, rows: int, context_tokens: int) -> int:  # noqa: ARG002
        """Memory that a launch of so many rows allocates and frees again; 0: little, and not known."""
        return 0

    def close(self) -> None:
        """Give the files and threads of the n-gram table back; idempotent."""
        if self._rows is not None:
            self._rows.close()

    def forward_pieces(self, pieces: Sequence[Piece]) -> Tensor:
        """Append every piece to its session; logits of the wanted rows, in order of the pieces.

        No piece may be empty and no session may occur twice. Raises EngineBusy, with no session
        changed, when pages or context do not suffice; ReadFailed when n-gram rows cannot be read,
        the sessions being of no further use then.
        """
        for piece in pieces:
            piece.session.reserve(len(piece.ids))
        tickets = [
            self._rows.begin(piece.ids, self._history(piece.session.ids))
            for piece in pieces
            if self._rows is not None
        ]
        try:
            with torch.inference_mode():
                return self._compute(pieces, tickets)
        finally:
            for ticket in tickets:
                ticket.cancel()

    def _compute(self, pieces: Sequence[Piece], tickets: Sequence[RowTicket]) -> Tensor:
        spans = _spans(pieces)
        rope_3T = torch.cat([span.known_3N[:, span.first :] for span in spans], dim=1)
        inputs_TD = self._embed(pieces, spans)
        x_TSD = inputs_TD.unsqueeze(1).repeat(1, self.config.streams, 1)
        wanted = Wanted.of(pieces, spans)
        last = len(self.weights.blocks) - 1
        for i, block in enumerate(self.weights.blocks):
            if block.ple is not None:
                x_TSD = self._ple(block.ple, x_TSD, pieces, spans, tickets)
            needed = wanted if i == last and self.head is None else None
            x_TSD = self._block(block, x_TSD, spans, self._index[i], rope_3T, needed)
        for piece, span in zip(pieces, spans, strict=True):
            _advance(piece, rope_3T[:, span.part])
        if self.head is not None:  # it reads the streams of every row
            self.head.follow(spans, x_TSD, inputs_TD)
            if len(wanted.rows_N) < len(x_TSD):
                x_TSD = x_TSD[wanted.rows_N]
        return self._logits(x_TSD)

    def _embed(self, pieces: Sequence[Piece], spans: tuple[Span, ...]) -> Tensor:
        """What the first layer reads, float32 [T, D]: embeddings, and images in their places."""
        ids_T = torch.tensor(
            [i for piece in pieces for i in piece.ids], dtype=torch.int64, device=self.device
        )
        x_TD = self.ops.embed(ids_T, self.weights.embed, self.dtype).float()
        for piece, span in zip(pieces, spans, strict=True):
            if piece.session.images:
                _lay_images(x_TD[span.part], piece, span.first, self.dtype)
        return x_TD

    def _ple(
        self,
        w: PleWeights,
        x_TSD: Tensor,
        pieces: Sequence[Piece],
        spans: tuple[Span, ...],
        tickets: Sequence[RowTicket],
    ) -> Tensor:
        """The n-gram layer."""
        config = self.config.ple
        assert config is not None
        rows_TE = self._ngram_rows(tickets, pieces)
        return ple(self.ops, self.config, config, w, x_TSD, rows_TE, spans)

    def _ngram_rows(self, tickets: Sequence[RowTicket], pieces: Sequence[Piece]) -> Tensor:
        """The launch's rows of the table; those of the next pieces are asked for."""
        assert self._rows is not None
        taken_TE = self._rows.take(*tickets)
        for piece in pieces:
            if len(piece.next_ids):
                before = [*self._history(piece.session.ids), *piece.ids]
                self._rows.prefetch(piece.next_ids, self._history(before))
        return taken_TE

    def _history(self, ids: Sequence[int]) -> Sequence[int]:
        """The last of `ids`, as many as the n-gram rows of the next token depend on."""
        assert self.config.ple is not None
        return ids[-self.config.ple.hash.context :]

    def _block(
        self,
        w: BlockWeights,
        x_TSD: Tensor,
        spans: tuple[Span, ...],
        index: int,
        rope_3T: Tensor,
        needed: Wanted | None,
    ) -> Tensor:
        """Streams behind the block: of all rows, or of those `needed`.

        The mixer's state takes in every row either way.
        """
        ops, c = self.ops, self.config
        if needed is not None and len(needed.rows_N) == len(x_TSD):
            needed = None
        h_TD, inject = ops.hyper_read(x_TSD, w.attn_hyper, c.rms_eps, self.dtype)
        assert inject is not None
        if isinstance(w.mixer, GdnWeights):
            y_TD = gdn(ops, c, w.mixer, h_TD, spans, index, needed)
        else:
            y_TD = qsa(ops, c, w.mixer, h_TD, spans, index, self._rope, rope_3T, needed)
        if needed is not None:
            x_TSD, inject = x_TSD[needed.rows_N], inject[needed.rows_N]
            if not len(x_TSD):
                return x_TSD
        x_TSD = ops.hyper_write(x_TSD, y_TD, inject)
        h_TD, inject = ops.hyper_read(x_TSD, w.mlp_hyper, c.rms_eps, self.dtype)
        assert inject is not None
        return ops.hyper_write(x_TSD, moe(ops, c, w.moe, h_TD), inject)

    def _logits(self, x_NSD: Tensor) -> Tensor:
        if not len(x_NSD):
            return torch.zeros(0, self.config.vocab, device=self.device)
        h_ND, _ = self.ops.hyper_read(x_NSD, self.weights.mixer, self.config.rms_eps, self.dtype)
        return self.ops.matmul(h_ND, self.weights.head, torch.float32)


def state_shape(c: ModelConfig, *, has_head: bool = False) -> StateShape:
    """Sizes of a session's state; a draft head's keys are one layer more."""
    return StateShape(
        pages=PageShape(
            layers=c.qsa_layers + has_head,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            index_dim=c.index_dim,
            index_ratio=c.index_ratio,
        ),
        recurrent=RecurrentShape(
            layers=c.gdn_layers,
            key_heads=c.gdn_key_heads,
            value_heads=c.gdn_value_heads,
            head_dim=c.gdn_head_dim,
            channels=c.gdn_channels,
            conv_rows=c.gdn_conv_kernel - 1,
            ple_width=c.wide if c.ple else 0,
            ple_rows=c.ple.history_rows if c.ple else 0,
        ),
        ngram_context=c.ple.hash.context if c.ple else 0,
        draft_width=c.wide if has_head else 0,
    )


def _spans(pieces: Sequence[Piece]) -> tuple[Span, ...]:
    spans, start = [], 0
    for piece in pieces:
        stop = start + len(piece.ids)
        assert stop > start, "an empty piece"
        spans.append(
            Span(
                session=piece.session,
                start=start,
                stop=stop,
                first=piece.session.position,
                known_3N=piece.session.foresee(_rope_positions(piece)),
            )
        )
        start = stop
    return tuple(spans)


def _rope_positions(piece: Piece) -> Tensor:
    session = piece.session
    return rope_positions(session.images, session.position, len(piece.ids))


def _lay_images(x_TD: Tensor, piece: Piece, first: int, dtype: torch.dtype) -> None:
    """Put the rows of images over the embeddings of their placeholders, in place."""
    given = {image.start: image.rows_ND for image in piece.images}
    for span in piece.session.images:
        start, stop = max(span.start, first), min(span.stop, first + len(piece.ids))
        if start < stop:
            rows_ND = given[span.start]
            assert len(rows_ND) == span.tokens, "an image has one row a placeholder"
            part = rows_ND[start - span.start : stop - span.start]
            x_TD[start - first : stop - first] = part.to(x_TD.device, dtype).float()


def _advance(piece: Piece, rope_3T: Tensor) -> None:
    session = piece.session
    session.extend([int(i) for i in piece.ids], rope_3T)
    session.recurrent.base = session.recurrent.base_after(session.position)
