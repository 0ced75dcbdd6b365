"""An engine on the tiny model that drafts in a set way, and a head that knows the future."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from civetta.engine.engine import Engine
from civetta.engine.load import load_trunk_only
from civetta.engine.load_vision import image_support
from civetta.engine.protocol import Finished, TokenEvent
from civetta.engine.speculation import Drafting
from civetta.engine.trunk_model import TrunkModel
from civetta.model.mtp import Chain
from civetta.model.vision_build import LazyTower
from civetta.options import DraftingOptions, EngineOptions, ModelOptions, Settings
from engine.fakes import info


class Prophet:
    """Predicts the given texts, and a wrong token at every `wrong_every`-th place."""

    def __init__(self, texts, vocab, wrong_every=0):
        self.texts = [list(text) for text in texts]
        self.vocab, self.wrong_every = vocab, wrong_every
        self.rounds = 0

    def begin(self, sessions, next_ids):
        self.rounds += 1
        self.known = {
            id(session): [*session.ids, token_id]
            for session, token_id in zip(sessions, next_ids, strict=True)
        }
        chain = Chain(sessions=tuple(sessions), steps=1, x_BSD=torch.zeros(len(sessions), 1))
        return self._logits(chain), chain

    def extend(self, chain, ids):
        for session, token_id in zip(chain.sessions, ids, strict=True):
            self.known[id(session)].append(token_id)
        chain = Chain(sessions=chain.sessions, steps=chain.steps + 1, x_BSD=chain.x_BSD)
        return self._logits(chain), chain

    def _logits(self, chain):
        logits_BV = torch.zeros(len(chain.sessions), self.vocab)
        for row, session in enumerate(chain.sessions):
            known = self.known[id(session)]
            place = len(known)
            for text in self.texts:
                if len(text) > place and text[:place] == known:
                    wrong = self.wrong_every and place % self.wrong_every == 0
                    logits_BV[row, (text[place] + bool(wrong)) % self.vocab] = 50.0
        return logits_BV


class Bench:
    """Loads a trunk once; `engine` makes engines on it."""

    def __init__(self, folder, *, placement="auto", **drafting):
        self.loaded = load_trunk_only(
            Settings(
                model=ModelOptions(model=str(folder), threads=1, ngram_placement=placement),
                drafting=DraftingOptions(**{"speculative": "mtp", **drafting}),
            )
        )
        self.trunk = self.loaded.trunk
        self.vocab = self.trunk.config.vocab

    def engine(
        self,
        *,
        sessions=1,
        context=512,
        draft=None,
        head=None,
        mode="mtp",
        fixed=True,
        costs=((), ()),
        clock=time.monotonic,
        cache=None,
        pages=None,
    ):
        drafting = None
        if draft:
            if mode == "mtp":
                head = head or self.trunk.head
            launches, steps = costs
            drafting = Drafting(
                mode=mode, most=draft, head=head, fixed=fixed, launches=launches, steps=steps
            )
        vision, images, tower = self.loaded.checked.vision, None, None
        if vision is not None:
            images = image_support(vision, self.loaded.checked, self.loaded.tokenizer)
            tower = LazyTower(vision, dtype=self.trunk.dtype, ops=self.loaded.ops)
        store = self.trunk.store(sessions=sessions, context_tokens=context, pages=pages)
        return Engine(
            TrunkModel(self.trunk, store, tower),
            replace(info(context), vocab_size=self.vocab, images=images),
            tokenizer=self.loaded.tokenizer,
            template=self.loaded.template,
            options=EngineOptions(sessions=sessions),
            clock=clock,
            drafting=drafting,
            cache=cache,
        )


def replies(engine, requests):
    """What each request said and how it ended, all submitted at once."""
    streams = [engine.submit(request) for request in requests]
    return [outcome(list(stream)) for stream in streams]


def outcome(events):
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    end = events[-1]
    assert isinstance(end, Finished)
    return {
        "ids": [event.token_id for event in tokens],
        "text": "".join(event.text for event in tokens) + end.text,
        "logprobs": [event.logprob for event in tokens],
        "reason": end.reason,
        "stop": end.stop,
        "usage": end.usage,
    }


def said(outcomes):
    """The parts of outcomes that drafting may not change."""
    return [{k: v for k, v in one.items() if k != "usage"} for one in outcomes]
