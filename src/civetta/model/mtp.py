"""The draft head: one more sparse attention block that predicts the token after next (model.md B).

Row p takes the trunk's streams after token p and the embedding of token p + 1, at position p, and
its logits say what token p + 2 may be. A chain goes on from the head's own streams. The head has no
recurrent state; its keys and values are the page layer behind the trunk's.

Nothing computed here decides a token of a reply: a wrong row costs an accepted draft, no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from civetta.model.inputs import Span
from civetta.model.moe import moe
from civetta.model.qsa import qsa_read, qsa_write
from civetta.model.rope import RopeTable
from civetta.model.weights import QsaWeights
from civetta.state.drafts import MOST_LAG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.kernels.ops import Ops
    from civetta.model.config import ModelConfig
    from civetta.model.weights import MtpWeights
    from civetta.state.drafts import DraftRows
    from civetta.state.session import Session

HiddenNorm = Literal["wide", "stream"]
"""One RMS over all streams together (the reference engines), or one a stream (model.md B.4 row 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Where a round of drafting stands: after `steps` steps, float32 streams x_BSD a session."""

    sessions: tuple[Session, ...]
    steps: int
    x_BSD: Tensor

    def keep(self, places: Sequence[int]) -> Chain:
        """The chain of some of the sessions."""
        return Chain(
            sessions=tuple(self.sessions[i] for i in places),
            steps=self.steps,
            x_BSD=self.x_BSD[list(places)],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Head rows [first, first + len(ids)) of one session: streams [T, W] and the tokens after.

    `inputs_ND`, if any, are what the trunk read for the newest of those tokens, images among them.
    """

    session: Session
    first: int
    ids: list[int]
    streams_TW: Tensor
    inputs_ND: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entered:
    """Rows that entered the block and whose keys are written: streams, attention's view of them,
    strength of writing back, and where they lie."""

    y_TSD: Tensor
    h_TD: Tensor
    inject_TS: Tensor
    spans: tuple[Span, ...]

    def last(self) -> _Entered:
        """The last row of each span, packed."""
        rows = [span.stop - 1 for span in self.spans]
        return _Entered(
            y_TSD=self.y_TSD[rows],
            h_TD=self.h_TD[rows],
            inject_TS=self.inject_TS[rows],
            spans=_single(self.spans),
        )


class MtpHead:
    """Weights and ops of the head; `sessions` bring their state along.

    `layer` is the number of its pages. Sessions come from a store whose shape counts the head.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: MtpWeights,
        ops: Ops,
        dtype: torch.dtype,
        *,
        norm: HiddenNorm = "wide",
        device: torch.device | None = None,
    ) -> None:
        self.config, self.weights, self.ops, self.dtype = config, weights, ops, dtype
        self.norm: HiddenNorm = norm
        self.layer = config.qsa_layers
        self._rope = RopeTable(config.rope_dims, config.rope_theta, config.mrope_section, device)

    def follow(self, spans: Sequence[Span], x_TSD: Tensor, inputs_TD: Tensor) -> None:
        """Take note of the trunk's streams of new rows, which are part of their sessions now.

        `inputs_TD`: what the trunk read for them, float32; at an image it is not the embedding of
        the id, so rows before such tokens are written at once.
        """
        x_TW = x_TSD.flatten(1)
        late: list[Session] = []
        inputs: list[Tensor | None] = []
        single: list[Span] = []
        for span in spans:
            drafts, position = _drafts(span.session), span.session.position
            image = bool(span.session.images) and any(
                i.start < position and i.stop > span.first for i in span.session.images
            )
            rows = span.stop - span.start
            if image or min(position - drafts.written, drafts.kept + rows) > MOST_LAG:
                drafts.push(x_TW.float(), span.start, span.stop)  # settled below
                late.append(span.session)
                inputs.append(inputs_TD[span.part] if image else None)
            elif rows == 1:
                single.append(span)
            else:
                drafts.push(_copied(x_TW[span.part]), 0, rows)
        _push_together(single, x_TW)
        self.catch_up(late, inputs)

    def catch_up(self, sessions: Sequence[Session], inputs: Sequence[Tensor | None] = ()) -> None:
        """Write the keys of every row whose next token is part of the session.

        `inputs`: what the trunk read for the newest tokens of each, where images are among them.
        """
        given = inputs or [None] * len(sessions)
        rows = [_behind(s, None, i) for s, i in zip(sessions, given, strict=True)]
        due = [one for one in rows if one.ids]
        if due:
            with torch.inference_mode():
                self._enter(due)
        for session in sessions:
            _drafts(session).settle(session.position)

    def begin(self, sessions: Sequence[Session], next_ids: Sequence[int]) -> tuple[Tensor, Chain]:
        """First step of a round: each session's next token, which the trunk has not seen yet.

        Logits float32 [B, V] for the token after it. Pages for the tokens of the whole chain are
        reserved; each session has the streams of its newest token (`can_draft`).
        """
        with torch.inference_mode():
            rows = [_behind(s, i) for s, i in zip(sessions, next_ids, strict=True)]
            x_BSD = self._finish(self._enter(rows).last())
            logits_BV = self._logits(x_BSD)
        for session in sessions:
            _drafts(session).settle(session.position)
        return logits_BV, Chain(sessions=tuple(sessions), steps=1, x_BSD=x_BSD)

    def extend(self, chain: Chain, ids: Sequence[int]) -> tuple[Tensor, Chain]:
        """One more step: the drafted tokens in, logits [B, V] for the ones after them out."""
        with torch.inference_mode():
            rows = [
                _Rows(
                    session=session,
                    first=session.position - 1 + chain.steps,
                    ids=[token_id],
                    streams_TW=x_SD.flatten()[None],
                )
                for session, token_id, x_SD in zip(chain.sessions, ids, chain.x_BSD, strict=True)
            ]
            x_BSD = self._finish(self._enter(rows))
            logits_BV = self._logits(x_BSD)
        return logits_BV, Chain(sessions=chain.sessions, steps=chain.steps + 1, x_BSD=x_BSD)

    def _enter(self, rows: Sequence[_Rows]) -> _Entered:
        """Streams into the block, and their keys into the pages."""
        ops, c, block, spans = self.ops, self.config, self.weights.block, _spans(rows)
        y_TSD = self._combine(rows, spans)
        h_TD, inject_TS = ops.hyper_read(y_TSD, block.attn_hyper, c.rms_eps, self.dtype)
        assert inject_TS is not None
        qsa_write(ops, c, self._mixer, h_TD, spans, self.layer, self._rope, _rope(spans))
        return _Entered(y_TSD=y_TSD, h_TD=h_TD, inject_TS=inject_TS, spans=spans)

    def _combine(self, rows: Sequence[_Rows], spans: Sequence[Span]) -> Tensor:
        """W_h norm(x_j) + W_e norm(embed) for each stream j, float32 [T, S, D]."""
        ops, c, w = self.ops, self.config, self.weights
        x_TW = torch.cat([one.streams_TW for one in rows])
        ids_T = torch.tensor([i for one in rows for i in one.ids], device=x_TW.device)
        e_TD = ops.embed(ids_T, w.embed, self.dtype)
        for one, span in zip(rows, spans, strict=True):
            if one.inputs_ND is not None:
                known = min(len(one.inputs_ND), len(one.ids))
                e_TD[span.stop - known : span.stop] = one.inputs_ND[-known:].to(self.dtype)
        e_TD = ops.rms_norm(e_TD, w.embed_norm_D, c.rms_eps)
        if self.norm == "wide":
            n_TW = ops.rms_norm(x_TW, w.hidden_norm_SD.flatten(), c.rms_eps)
        else:
            n_TW = ops.rms_norm(x_TW.view(-1, c.streams, c.hidden), w.hidden_norm_SD, c.rms_eps)
        n_ND = n_TW.reshape(-1, c.hidden).to(self.dtype)
        h_TSD = ops.matmul(n_ND, w.hidden_in, torch.float32).view(-1, c.streams, c.hidden)
        return h_TSD + ops.matmul(e_TD, w.embed_in, torch.float32).unsqueeze(1)

    def _finish(self, rows: _Entered) -> Tensor:
        """The block's streams after attention and experts."""
        ops, c, block, spans = self.ops, self.config, self.weights.block, rows.spans
        o_TD = qsa_read(ops, c, self._mixer, rows.h_TD, spans, self.layer, self._rope, _rope(spans))
        x_TSD = ops.hyper_write(rows.y_TSD, o_TD, rows.inject_TS)
        h_TD, inject_TS = ops.hyper_read(x_TSD, block.mlp_hyper, c.rms_eps, self.dtype)
        assert inject_TS is not None
        return ops.hyper_write(x_TSD, moe(ops, c, block.moe, h_TD), inject_TS)

    def _logits(self, x_BSD: Tensor) -> Tensor:
        h_BD, _ = self.ops.hyper_read(x_BSD, self.weights.mixer, self.config.rms_eps, self.dtype)
        return self.ops.matmul(h_BD, self.weights.head, torch.float32)

    @property
    def _mixer(self) -> QsaWeights:
        mixer = self.weights.block.mixer
        assert isinstance(mixer, QsaWeights)
        return mixer


def can_draft(session: Session) -> bool:
    """Whether the streams of the session's newest token are at hand."""
    return session.drafts is not None and session.drafts.kept > 0


def _drafts(session: Session) -> DraftRows:
    assert session.drafts is not None, "the session was made without room for the draft head"
    return session.drafts


def _push_together(spans: Sequence[Span], x_TW: Tensor) -> None:
    """Take note of single rows in one copy for all their sessions.

    Only of single ones: a session that waits keeps the copy, and so the rows of the others, which
    are no more in all than each session may have waiting.
    """
    if not spans:
        return
    if spans[-1].stop == len(spans):  # no other rows in between
        copied_NW = _copied(x_TW[: len(spans)])
    else:
        copied_NW = torch.cat([x_TW[span.part] for span in spans]).float()
    for place, span in enumerate(spans):
        _drafts(span.session).push(copied_NW, place, place + 1)


def _copied(x_TW: Tensor) -> Tensor:
    """A float32 copy: a launch's buffers are used again."""
    return x_TW.to(torch.float32, copy=True)


def _behind(session: Session, next_id: int | None, inputs_ND: Tensor | None = None) -> _Rows:
    """The rows that are still to be written; the newest one too when its next token is given."""
    drafts, position = _drafts(session), session.position
    count = drafts.lag(position)
    first = position - count
    ids = session.ids[first + 1 :]
    if next_id is not None:
        ids.append(next_id)
    streams_TW = drafts.newest(count)[: len(ids)] if ids else torch.zeros(0)
    return _Rows(session=session, first=first, ids=ids, streams_TW=streams_TW, inputs_ND=inputs_ND)


def _spans(rows: Sequence[_Rows]) -> tuple[Span, ...]:
    spans, start = [], 0
    for one in rows:
        stop = start + len(one.ids)
        known_3N = _known(one.session, one.first + len(one.ids))
        spans.append(
            Span(session=one.session, start=start, stop=stop, first=one.first, known_3N=known_3N)
        )
        start = stop
    return tuple(spans)


def _known(session: Session, tokens: int) -> Tensor:
    """Rope positions of the first `tokens` tokens; text is assumed behind the sequence's end."""
    known_3N = session.rope_positions()
    more = tokens - session.position
    if more <= 0:
        return known_3N[:, :tokens]
    after = known_3N[:, -1].max() + 1
    return session.foresee((after + torch.arange(more, device=known_3N.device)).expand(3, -1))


def _rope(spans: Sequence[Span]) -> Tensor:
    parts = [s.known_3N[:, s.first : s.first + s.stop - s.start] for s in spans]
    return torch.cat(parts, dim=1)


def _single(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The last row of each span, packed."""
    return tuple(
        Span(
            session=span.session,
            start=i,
            stop=i + 1,
            first=span.first + span.stop - span.start - 1,
            known_3N=span.known_3N,
        )
        for i, span in enumerate(spans)
    )
