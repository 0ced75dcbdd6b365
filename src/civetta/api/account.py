"""What is known of one request while it is served: for its log line, the trace and the counters.

Counts and times only: no text of a prompt or a reply comes here.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from civetta.api.accounting import timings_payload
from civetta.api.choices import Numbered, together
from civetta.engine.protocol import Progress, PromptLogprobs, Started

if TYPE_CHECKING:
    from starlette.types import Scope

    from civetta.api.trace import Trace
    from civetta.errors import CivettaError
    from civetta.types import Usage


class Traffic:
    """Counts of the server's own: requests open now, responses by status."""

    def __init__(self) -> None:
        self.open = 0
        self.statuses: Counter[int] = Counter()


class Account:
    """One request's books. `began_s` is when it arrived, on the monotonic clock."""

    __slots__ = (
        "_flowing",
        "_trace",
        "began_s",
        "error_code",
        "reason",
        "request_id",
        "schema_ignored",
        "usage",
    )

    def __init__(self, request_id: str, trace: Trace | None) -> None:
        self.request_id = request_id
        self.began_s = time.monotonic()
        self.usage: Usage | None = None
        self.reason: str | None = None
        self.error_code: str | None = None
        self.schema_ignored: tuple[str, ...] = ()
        self._trace = trace
        self._flowing = False

    def see(self, item: Any) -> None:
        """Take note of an event of the generation, from the engine or the chat client."""
        if isinstance(item, Numbered):
            item = item.item
        usage = getattr(item, "usage", None)
        if usage is not None:
            self.usage = (
                usage if self.usage is None else together((self.usage, usage), per_prompt=1)
            )
            reason = getattr(item, "finish_reason", None) or getattr(item, "reason", None)
            self.reason = None if reason is None else str(reason)
        elif self._flowing or isinstance(item, (Progress, PromptLogprobs)):
            return
        elif isinstance(item, Started):
            self.tell("started", prompt_tokens=item.prompt_tokens, cached_tokens=item.cached_tokens)
        else:
            self._flowing = True
            self.tell("first_token")

    def failed(self, error: CivettaError) -> None:
        """Take note of the error that the client is told."""
        self.error_code = error.code

    def tell(self, event: str, **fields: object) -> None:
        """Write an event to the trace, if there is one."""
        if self._trace is not None:
            self._trace.write(self.request_id, event, ms=round(self.age_s() * 1000, 3), **fields)

    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.began_s

    def figures(self) -> dict[str, object]:
        """What the log line and the trace say of a generation; empty for other requests."""
        usage, ignored = self.usage, ",".join(self.schema_ignored) or None
        if usage is None:
            return {
                "reason": self.reason,
                "error": self.error_code,
                "schema_ignored": ignored,
            }
        timings = timings_payload(usage)
        drafts = f"{usage.draft_tokens_accepted}/{usage.draft_tokens}"
        return {
            "reason": self.reason,
            "error": self.error_code,
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "cache": usage.cache.source,
            "cache_miss": usage.cache.miss,
            "cache_miss_token": usage.cache.miss_token,
            "tokens": usage.completion_tokens,
            "queue_ms": round(usage.queue_s * 1000),
            "ttft_ms": round((usage.queue_s + usage.prefill_s) * 1000),
            "pp": round(timings["prompt_per_second"], 1),
            "tg": round(timings["predicted_per_second"], 1),
            "drafts": drafts if usage.draft_tokens else None,
            "schema_ignored": ignored,
        }


def account_of(scope: Scope) -> Account:
    """The account of the request of this ASGI scope; the guard put it there."""
    account: Account = scope["state"]["account"]
    return account
