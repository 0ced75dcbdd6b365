"""`Engine`: the `EngineClient` that runs in this process; it owns the step thread."""

from __future__ import annotations

import math
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from civetta.decode.guides import Guides
from civetta.decode.limits import check_sampling
from civetta.decode.stream import TokenText
from civetta.engine.device import device_bytes, device_fault
from civetta.engine.loop import LoopLimits, StepLoop
from civetta.engine.outbox import OutboxStream, Patience
from civetta.engine.request import check_request, text_only
from civetta.engine.scheduler import Budget
from civetta.engine.stall import StallWatch
from civetta.errors import RequestInvalid, TemplateError, TokenizerError
from civetta.options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import TracebackType

    from civetta.cache.protocol import ContinuationCache
    from civetta.chat.template import ChatTemplate
    from civetta.chat.tokenizer import Tokenizer
    from civetta.engine.language_model import LanguageModel
    from civetta.engine.protocol import (
        EngineStats,
        GenerateRequest,
        GenerationStream,
        ModelInfo,
        RequestView,
    )
    from civetta.engine.speculation import Drafting

MAX_UNREAD_EVENTS = 16_384
"""Events of one reply that may lie unread before the request fails: some megabytes at most."""

STEP_GRACE_S = 1.0
"""After a deadline: time for the step to end the request; then its reader is told without it."""


class Engine:
    """Serves requests with one model; usable as a context manager, which closes it.

    `drafting` says how to draft tokens ahead; None: not at all.
    `info.vocab_size` and `info.context_tokens` bound token ids and sequences. `end_ids` end a
    reply; left out, they are the tokenizer's. `options.request_timeout_ms` is the default deadline
    of requests that bring none. The model and the cache are used by the step thread alone, which
    closes the cache at its end and gives it `cache_drain_s` seconds to write what is queued.
    """

    def __init__(
        self,
        model: LanguageModel,
        info: ModelInfo,
        *,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        end_ids: Collection[int] | None = None,
        options: EngineOptions | None = None,
        cache: ContinuationCache | None = None,
        cache_drain_s: float = 0.0,
        max_unread: int = MAX_UNREAD_EVENTS,
        image_cache_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        drafting: Drafting | None = None,
    ) -> None:
        self._info, self._tokenizer, self._template = info, tokenizer, template
        options = options or EngineOptions()
        if end_ids is None:
            end_ids = () if tokenizer is None else tokenizer.eog_ids
        self._guides = Guides(tokenizer, info.vocab_size)
        self._default_timeout_s = options.request_timeout_ms / 1000 or None
        limits = LoopLimits(
            budget=Budget(
                sessions=options.sessions,
                prefill_batch=options.batch_on(info.device),
                prefill_chunk=options.prefill_chunk,
                pages=model.pages_total,
            ),
            max_pending=options.max_pending,
            context_tokens=info.context_tokens,
            max_text_bytes=options.max_output_bytes,
            max_unread=max_unread,
            end_ids=frozenset(end_ids),
            cache_drain_s=cache_drain_s,
            image_cache_bytes=image_cache_bytes,
        )
        self._loop = StepLoop(
            model,
            limits,
            new_text=lambda stops: TokenText(tokenizer, stops),
            cache=cache,
            clock=clock,
            drafting=drafting,
            device_fault=partial(device_fault, info.device),
        )
        self._thread = threading.Thread(target=self._loop.run, name="civetta-step", daemon=True)
        self._thread.start()
        self._watch = StallWatch(
            self._loop.step_s,
            timeout_s=options.stall_timeout_ms / 1000 or math.inf,
            whose=self._loop.running_ids,
        )
        if options.stall_timeout_ms:
            self._watch.start()
        # For an engine that is forgotten, and at the interpreter's exit: a step that still runs
        # while the interpreter is taken down would crash the process.
        weakref.finalize(self, _shut_down, self._loop, self._thread, self._watch)

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer; raises TokenizerError when the checkpoint has none."""
        if self._tokenizer is None:
            raise TokenizerError(
                f"{self._info.path} has no tokenizer; put the model's tokenizer files beside it, or"
                " send token ids."
            )
        return self._tokenizer

    @property
    def template(self) -> ChatTemplate:
        """Its chat template; raises TemplateError when there is none."""
        if self._template is None:
            raise TemplateError(
                f"{self._info.path} cannot chat without a tokenizer; send token ids instead."
            )
        return self._template

    def submit(self, request: GenerateRequest) -> GenerationStream:
        """Queue a request; the stream's events begin when its turn comes. Compiles its constraint.

        Raises ContextOverflow, RequestInvalid, EngineBusy, EngineClosed or DeviceLost before anything
        runs.
        """
        check_request(
            request, vocab_size=self._info.vocab_size, context_tokens=self._info.context_tokens
        )
        check_sampling(request.sampling)
        if request.images and self._info.images is None:
            raise RequestInvalid(text_only(self._info.model_id), param="images")
        if request.stop and self._tokenizer is None:
            raise RequestInvalid(
                "Stop strings need a tokenizer, and this model's files have none; leave them out.",
                param="stop",
            )
        if request.timeout_s is None:
            request = replace(request, timeout_s=self._default_timeout_s)
        guide = self._guides.of(
            thinking=request.thinking,
            thinking_budget=request.thinking_budget,
            constraint=request.constraint,
            ends=not request.ignore_eos,
        )
        queued, outbox = self._loop.submit(request, guide)
        patience = None
        if request.timeout_s is not None:
            patience = Patience(
                seconds=request.timeout_s + STEP_GRACE_S,
                give_up=partial(self._loop.give_up, queued),
            )
        return OutboxStream(outbox, queued.cancel, patience)

    def abort(self, request_id: str) -> bool:
        """End the request of that id within one step or chunk; False when none waits or runs."""
        return self._loop.abort(request_id)

    def views(self) -> tuple[RequestView, ...]:
        """Who runs, in order of admission, then who waits; cheap."""
        return self._loop.views()

    def stats(self) -> EngineStats:
        """Counters now; cheap, no device work."""
        return replace(
            self._loop.stats(),
            stalls_total=self._watch.stalls,
            stalled_s=self._watch.stalled_s,
            device_bytes=0 if self._loop.device_lost else device_bytes(self._info.device),
            device_lost=self._loop.device_lost,
        )

    def close(self) -> None:
        """End after the present step or chunk: what runs ends as cancelled, what waits is refused.

        Idempotent, and safe from any thread but the step thread.
        """
        _shut_down(self._loop, self._thread, self._watch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _shut_down(loop: StepLoop, thread: threading.Thread, watch: StallWatch) -> None:
    loop.stop()
    watch.close()
    if thread is not threading.current_thread():  # a forgotten engine may be collected there
        thread.join()
