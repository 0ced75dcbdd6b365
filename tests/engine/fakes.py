"""A scripted model and a byte tokenizer: the engine's whole world without weights."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from civetta.cache.off import NoRestore
from civetta.cache.protocol import CacheStats, KeepKind, MissReason, RestorePoint, Tier
from civetta.engine.protocol import GenerateRequest, ModelInfo
from civetta.errors import EngineBusy
from civetta.kernels.ops import PAGE_TOKENS
from civetta.types import SamplingParams

VOCAB = 260
IM_END = 256
END_OF_TEXT = 257
THINK = 258
THINK_END = 259
GREEDY = SamplingParams(temperature=0)


class ByteTokenizer:
    """One token a byte, and four special ones; what `Tokenizer` offers, as far as it is used."""

    def __init__(self):
        self.vocab_size = VOCAB
        self.specials = {
            "<|im_end|>": IM_END,
            "<|endoftext|>": END_OF_TEXT,
            "<think>": THINK,
            "</think>": THINK_END,
        }
        self.control_ids = frozenset({IM_END, END_OF_TEXT})
        self.eos_id = IM_END
        self.eog_ids = frozenset({IM_END, END_OF_TEXT})

    def token_bytes(self, token_id):
        for text, special in self.specials.items():
            if special == token_id:
                return text.encode()
        return bytes([token_id])

    def encode(self, text, *, parse_special=True, literal_starts=()):
        ids, at = [], 0
        while at < len(text):
            special = next(
                (
                    s
                    for s in self.specials
                    if parse_special and at not in literal_starts and text.startswith(s, at)
                ),
                None,
            )
            if special is None:
                ids += text[at].encode()
                at += 1
            else:
                ids.append(self.specials[special])
                at += len(special)
        return ids

    def least_tokens(self, text):
        return len(text) // 2

    def decode(self, ids, *, skip_special=False):
        kept = [i for i in ids if not (skip_special and i in self.control_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")


@dataclass
class FakeSession:
    model: FakeModel
    ids: list = field(default_factory=list)
    closed: bool = False

    @property
    def pages(self):
        return range(-(-len(self.ids) // PAGE_TOKENS))

    @property
    def position(self):
        return len(self.ids)

    def pages_needed(self, tokens):
        return -(-(self.position + tokens) // PAGE_TOKENS) - len(self.pages)

    def reserve(self, tokens):
        assert not self.closed
        self.model.on_reserve(self, tokens)

    def close(self):
        assert not self.closed, "closed twice"
        self.closed = True
        self.model.open_sessions -= 1
        if self.model.fail_close:
            raise RuntimeError("close failed")


class FakeModel:
    """`next_token(ids)` says which token follows; its logit is 8, the others' are 0.

    Watches its users: one thread only, no use after close, rows "none" for all but the last part
    of a prompt. `on_forward(session, ids)` may raise, wait or look.
    """

    shortlists = None

    def __init__(self, next_token, *, on_forward=None, on_open=None, on_reserve=None):
        self.next_token = next_token
        self.on_forward = on_forward or (lambda session, ids: None)
        self.on_open = on_open or (lambda: None)
        self.on_reserve = on_reserve or (lambda session, tokens: None)
        self.open_sessions = 0
        self.most_sessions = 0
        self.fail_close = False
        self.pages_total = self.pages_free = 10**9
        self.calls = []
        self.launches = []
        self.expected = []  # (position, ids) of tokens that were announced
        self.threads = set()

    def open_session(self):
        self.threads.add(threading.get_ident())
        self.on_open()
        self.open_sessions += 1
        self.most_sessions = max(self.most_sessions, self.open_sessions)
        return FakeSession(self)

    def expect(self, session, ids):
        assert not session.closed
        self.expected.append((session.position, tuple(ids)))

    def forward_pieces(self, pieces):
        self.threads.add(threading.get_ident())
        sessions = [id(piece.session) for piece in pieces]
        assert len(set(sessions)) == len(sessions) > 0
        self.launches.append([len(piece.ids) for piece in pieces])
        for piece in pieces:
            if len(piece.next_ids):
                at = piece.session.position + len(piece.ids)
                self.expected.append((at, tuple(piece.next_ids)))
        rows = [self.forward(piece.session, piece.ids, piece.rows) for piece in pieces]
        return torch.cat(rows)

    def forward(self, session, ids, rows):
        assert not session.closed
        assert len(ids) > 0
        self.calls.append((len(ids), rows))
        self.on_forward(session, list(ids))
        start = len(session.ids)
        session.ids.extend(ids)
        wanted = {
            "none": [],
            "last": [len(session.ids)],
            "all": range(start + 1, len(session.ids) + 1),
        }
        logits = torch.zeros(len(wanted[rows]), VOCAB)
        for row, end in enumerate(wanted[rows]):
            logits[row, self.next_token(session.ids[:end])] = 8.0
        return logits


@dataclass
class FakeRestore:
    """Gives the session its tokens after `delay` looks; `fault` is none, damaged or busy."""

    session: FakeSession
    ids: tuple
    delay: int = 0
    fault: str = "none"
    tokens: int = 0
    miss: MissReason | None = None
    over: bool = False

    def advance(self):
        assert not self.over
        if self.delay:
            self.delay -= 1
            return False
        self.over = True
        if self.fault == "busy":
            raise EngineBusy("no pages")
        if self.fault == "damaged":
            self.miss = MissReason.DAMAGED
            return True
        self.session.ids.extend(self.ids)
        self.tokens = len(self.ids)
        return True

    def cancel(self):
        self.over = True


class FakeCache:
    """Keeps every state it is given as its tokens; asks for the middle and the end of a prompt.

    `next_restore` (delay, fault) may be changed by tests; `kept` lists what was kept and why.
    """

    def __init__(self):
        self.states = set()
        self.kept = []
        self.restores = []
        self.next_restore = (0, "none")
        self.closed_with = None
        self.spare = 0

    def find(self, tokens, images=()):
        ids = self._asked = tuple(tokens)
        depth = max(
            (len(s) for s in self.states if len(s) < len(ids) and ids[: len(s)] == s), default=0
        )
        wanted = sorted({len(ids) // 2, len(ids) - 1, len(ids)})
        return RestorePoint(
            cached_tokens=depth,
            tier=Tier.RAM if depth else Tier.NONE,
            keep_at=tuple(at for at in wanted if at > depth),
            miss=None if depth else MissReason.COLD,
            entry=depth,
        )

    def begin(self, point, session):
        assert not session.ids
        if point.tier is Tier.NONE:
            return NoRestore()
        delay, fault = self.next_restore
        restore = FakeRestore(session, self._asked[: point.cached_tokens], delay, fault)
        self.restores.append(restore)
        return restore

    def keep(self, session, kind, images=()):
        assert not session.closed
        self.states.add(tuple(session.ids))
        self.kept.append((len(session.ids), KeepKind(kind)))
        return True

    def make_room(self, pages):
        if self.spare >= pages > 0:
            self.spare -= pages
            return True
        return False

    def stats(self):
        return CacheStats(entries_ram=len(self.states))

    def check(self):
        pass

    def close(self, *, drain_s=0.0):
        assert self.closed_with is None
        self.closed_with = drain_s


def script(prompt_tokens, tokens):
    """The model that answers a prompt of that length with these tokens, then end tokens."""

    def next_token(ids):
        index = len(ids) - prompt_tokens
        return tokens[index] if index < len(tokens) else IM_END

    return next_token


def says(prompt_tokens, text, end=IM_END):
    """The model that answers with the bytes of `text` and an end token."""
    return script(prompt_tokens, [*text.encode(), end])


def babble(ids):
    """A model whose next token depends on all tokens before it; ends now and then."""
    state = 17
    for token in ids:
        state = (state * 31 + token + 7) % 1_000_003
    return IM_END if state % 23 == 0 else 97 + state % 26


def babbled(prompt, limit):
    """What a greedy request gets from `babble`, without any engine."""
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        token = babble(ids)
        ids.append(token)
        if token == IM_END:
            break
    return ids[len(prompt) :]


def info(context_tokens=512):
    return ModelInfo(
        model_id="fake",
        path="fake.gguf",
        context_tokens=context_tokens,
        vocab_size=VOCAB,
        parameters=0,
        format="none",
        device="cpu",
        dtype="f32",
        created_s=0,
        has_tokenizer=True,
    )


def ask(prompt="hello", **fields):
    """A greedy request whose prompt is text or a list of ids."""
    ids = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
    return GenerateRequest(**{"request_id": "r1", "prompt_ids": ids, "sampling": GREEDY, **fields})


class ManualClock:
    """Time that moves when told."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def wait_until(condition, timeout_s=20.0):
    """Poll until `condition()`; for what other threads do."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)
