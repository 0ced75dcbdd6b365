"""Decoding deep in a context, with drafts and without: the same tokens, and what drafts bring there.

    python benchmarks/drafting_depth.py [-m MODEL] [--depth 12000] [--reply 64] [--rounds 3]

One engine without drafts and one with the model's own head answer one prompt of --depth tokens in
turn, A B A B; from the second time on the prompt is in the cache, so that only decoding counts.
Prints seconds of decoding, the ratio round by round, drafts and how many stood. Fails when a reply
differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics

from civetta.engine.load import load_engine
from civetta.engine.protocol import Finished, GenerateRequest, TokenEvent
from civetta.options import DraftingOptions, EngineOptions, ModelOptions, Settings
from civetta.types import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--depth", type=int, default=12_000)
    parser.add_argument("--reply", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    logging.getLogger("civetta").setLevel(logging.ERROR)
    model = ModelOptions(model=a.model, threads=a.threads, ngram_placement="disk")
    engines = {
        mode: load_engine(
            Settings(
                model=model,
                engine=EngineOptions(sessions=1),
                drafting=DraftingOptions(speculative=mode),
            )
        )
        for mode in ("off", "mtp")
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    replies, drafts = set(), {}
    for turn in range(a.rounds + 1):  # the first computes the prompt
        for mode, engine in engines.items():
            ids, usage = ask(engine, a.depth, a.reply)
            replies.add(ids)
            drafts[mode] = f"{usage.draft_tokens_accepted}/{usage.draft_tokens}"
            if turn:
                assert usage.cached_tokens == a.depth - 1
                seconds[mode].append(round(usage.decode_s, 4))
    for engine in engines.values():
        engine.close()
    assert len(replies) == 1, "drafting changed a reply"
    ratios = [off / mtp for off, mtp in zip(seconds["off"], seconds["mtp"], strict=True)]
    report = {
        "depth": a.depth,
        "reply_tokens": a.reply,
        "decode_s": seconds,
        "speedup": [round(r, 3) for r in ratios],
        "median_speedup": round(statistics.median(ratios), 3),
        "drafts_accepted": drafts["mtp"],
    }
    print(json.dumps(report, indent=2))


def ask(engine, depth: int, reply: int):
    text = "The cat sat on the mat and saw that nobody else was there. "
    ids = engine.tokenizer.encode(text * (depth // 8))[:depth]
    assert len(ids) == depth
    request = GenerateRequest(
        request_id="deep",
        prompt_ids=tuple(ids),
        sampling=SamplingParams(temperature=0),
        max_tokens=reply,
        ignore_eos=True,
    )
    events = list(engine.submit(request))
    assert isinstance(events[-1], Finished)
    return tuple(e.token_id for e in events if isinstance(e, TokenEvent)), events[-1].usage


if __name__ == "__main__":
    main()
