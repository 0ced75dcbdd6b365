"""Carry out cases: reach the depth, take the time of the work, keep what came out.

Greedy decoding. The depth of a case is prefilled once, untimed; every repetition, the one that
warms up included, goes on from a fork of that state, which shares its pages and copies the rest.
"""

from __future__ import annotations

import gc
import hashlib
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from civetta.bench import gpu
from civetta.bench.drafted import DraftedReplies
from civetta.bench.kernel_profile import profile_kernels
from civetta.bench.phases import PhaseTimer, timed_trunk
from civetta.bench.texts import stream
from civetta.bench.usage import Usage, UsageWatch
from civetta.decode.lengths import MOST_DRAFTS
from civetta.errors import LogitsInvalid
from civetta.kernels.ops import PAGE_TOKENS
from civetta.model.inputs import Piece
from civetta.state.drafts import MOST_LAG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from civetta.bench.case import Case
    from civetta.bench.kernel_table import Ceilings, KernelRow
    from civetta.bench.subject import Subject
    from civetta.model.inputs import Rows
    from civetta.model.trunk import Trunk
    from civetta.state.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How often, which tokens (texts.py), and what to look at besides the time."""

    repetitions: int
    seed: int = 0
    text: str = "random"
    phases: bool = False
    memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """SHA-256, a session each: of the generated ids (int64, little-endian), and of the last
    position's logits (float32, little-endian)."""

    ids: tuple[str, ...]
    logits: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One repetition. `phases_s` is empty when phases were not asked for.

    drafts: tokens that were drafted, and of those how many stood; None where nothing drafts.
    """

    seconds: float
    output: Output
    phases_s: dict[str, float]
    drafts: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All repetitions of a case with one subject, in the order of time."""

    case: Case
    subject: Subject
    samples: tuple[Sample, ...]
    usage: Usage | None

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition, all sessions together."""
        tokens = self.case.tokens * self.case.sessions
        return [tokens / sample.seconds for sample in self.samples]


def measure(case: Case, subjects: Sequence[Subject], options: Options) -> list[Measurement]:
    """Run a case with the subjects in turn (A B A B ...), each warmed up before.

    Raises LogitsInvalid, ReadFailed, or EngineBusy when the state does not fit the memory.
    """
    benches = [_Bench(case, subject, options) for subject in subjects]
    samples: list[list[Sample]] = [[] for _ in benches]
    for _ in range(1 + options.repetitions):
        for subject, bench, kept in zip(subjects, benches, samples, strict=True):
            if len(subjects) > 1:
                subject.activate()
            kept.append(bench.repeat())
    return [
        Measurement(case=case, subject=subject, samples=tuple(kept[1:]), usage=bench.usage())
        for subject, bench, kept in zip(subjects, benches, samples, strict=True)
    ]


def profile(case: Case, subject: Subject, options: Options, ceilings: Ceilings) -> list[KernelRow]:
    """The kernels of one repetition of a case. Raises UsageError for a subject not on a GPU."""
    bench = _Bench(case, subject, replace(options, phases=False, memory=False))
    return profile_kernels(subject.trunk, bench.repeat, ceilings)


class _Bench:
    """One subject set up for one case."""

    def __init__(self, case: Case, subject: Subject, options: Options) -> None:
        self._case, self._subject, self._options = case, subject, options
        self._timer = PhaseTimer() if options.phases else None
        trunk = subject.trunk
        self._trunk: Trunk = trunk if self._timer is None else timed_trunk(trunk, self._timer)
        self._streams = [
            stream(
                options.text,
                seed=options.seed,
                session=i,
                count=case.context_tokens,
                vocab=trunk.config.vocab,
                tokenizer=subject.tokenizer,
            )
            for i in range(case.sessions)
        ]
        self._drafts = subject.drafting is not None and case.kind == "decode"
        # Drafts that do not stand lie behind the last token for a moment.
        room = MOST_DRAFTS if self._drafts else 0
        self._store = trunk.store(
            sessions=case.sessions,
            context_tokens=case.context_tokens + room,
            pages=_pages(case, room),
        )
        self._deep = [self._store.open() for _ in self._streams]
        self._drafted: DraftedReplies | None = None
        self._usages: list[Usage] = []

    def repeat(self) -> Sample:
        """Reach the depth, then do the work that is timed."""
        case = self._case
        with UsageWatch() if self._options.memory else nullcontext() as watch:
            if self._deep[0].position < case.depth:
                self._prefill(self._deep, 0, case.depth, "none")
            if self._drafts:
                sample = self._timed_drafts()
            else:
                sample = self._timed_forks()
        if watch is not None:
            self._usages.append(watch.usage())
        return sample

    def usage(self) -> Usage | None:
        """Peaks over all repetitions, the warm-up included."""
        if not self._usages:
            return None
        return Usage(
            rss_peak_bytes=max(u.rss_peak_bytes for u in self._usages),
            device_peak_bytes=max(u.device_peak_bytes for u in self._usages),
            threads_peak=max(u.threads_peak for u in self._usages),
        )

    def _timed_forks(self) -> Sample:
        sessions = [session.fork() for session in self._deep]
        try:
            return self._timed(sessions)
        finally:
            for session in sessions:
                session.close()

    def _timed_drafts(self) -> Sample:
        drafting = self._subject.drafting
        assert drafting is not None
        if self._drafted is None:
            self._drafted = DraftedReplies(
                self._case,
                self._trunk,
                drafting,
                store=self._store,
                deep=self._deep,
                streams=self._streams,
            )
        gc.collect()
        gpu.settle()
        done = self._drafted.run()
        ids = tuple(map(_hashed_ids, done.ids))
        return Sample(
            seconds=done.seconds,
            output=Output(ids=ids, logits=("",) * len(ids)),
            phases_s={},
            drafts=(done.drafts, done.accepted),
        )

    def _timed(self, sessions: Sequence[Session]) -> Sample:
        case = self._case
        gc.collect()
        gpu.settle()
        if self._timer is not None:
            self._timer.take(0.0)
        began = time.perf_counter()
        if case.kind == "prefill":
            logits_CL = self._prefill(sessions, case.depth, case.context_tokens, "last")
            ids = [_greedy(logits_CL)]
        else:
            logits_CL, ids = self._decode(sessions)
        seconds = time.perf_counter() - began
        return Sample(
            seconds=seconds,
            output=_hashed(ids, logits_CL),
            phases_s={} if self._timer is None else self._timer.take(seconds),
        )

    def _prefill(self, sessions: Sequence[Session], start: int, stop: int, rows: Rows) -> Tensor:
        """Tokens start ... stop of every stream, in launches of `prefill_batch` tokens together."""
        step = max(self._subject.prefill_batch // len(sessions), 1)
        logits = torch.zeros(0)
        for first in range(start, stop, step):
            behind = min(first + step, stop)
            logits = self._trunk.forward_pieces(
                [
                    Piece(
                        session=session,
                        ids=stream[first:behind],
                        rows=rows if behind == stop else "none",
                        next_ids=stream[behind : min(behind + step, stop)],
                    )
                    for session, stream in zip(sessions, self._streams, strict=True)
                ]
            )
        return logits

    def _decode(self, sessions: Sequence[Session]) -> tuple[Tensor, list[list[int]]]:
        """The stream's next token, then each session's own: logits at the end, ids a step."""
        ids = [stream[self._case.depth] for stream in self._streams]
        generated = []
        logits_CL = torch.zeros(0)
        for _ in range(self._case.tokens):
            logits_CL = self._trunk.forward_pieces(
                [Piece(session=s, ids=[i]) for s, i in zip(sessions, ids, strict=True)]
            )
            ids = _greedy(logits_CL)
            generated.append(ids)
            for session, token in zip(sessions, ids, strict=True):
                self._trunk.expect(session, [token])  # as the engine does
        return logits_CL, generated


def _pages(case: Case, room: int) -> int:
    """For the depth, and for one fork at a time that goes on from it in pages of its own.

    The pages of the depth's last tokens are among those: a draft head writes their keys late.
    """
    deep, whole = -(-case.depth // PAGE_TOKENS), -(-(case.context_tokens + room) // PAGE_TOKENS)
    own = whole - max(case.depth - 1 - MOST_LAG, 0) // PAGE_TOKENS
    return case.sessions * (deep + own)


def _greedy(logits_CL: Tensor) -> list[int]:
    """The likeliest token of each row; ties to the lower id. Raises LogitsInvalid."""
    highest_C = logits_CL.amax(-1, keepdim=True)  # a NaN is above any number
    places_L = torch.arange(logits_CL.shape[-1], device=logits_CL.device)
    first_C = torch.where(logits_CL == highest_C, places_L, len(places_L)).amin(-1)
    found_C = torch.where(highest_C[:, 0].isfinite(), first_C, -1).tolist()
    if min(found_C) < 0:
        raise LogitsInvalid("the model computed NaN or infinity, so there is no next token")
    return [int(i) for i in found_C]


def _hashed_ids(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.array(ids, dtype="<i8").tobytes()).hexdigest()


def _hashed(ids: Sequence[Sequence[int]], logits_CL: Tensor) -> Output:
    rows = logits_CL.float().cpu().numpy().astype("<f4", copy=False)
    return Output(
        ids=tuple(_hashed_ids(own) for own in zip(*ids, strict=True)),
        logits=tuple(hashlib.sha256(row.tobytes()).hexdigest() for row in rows),
    )
