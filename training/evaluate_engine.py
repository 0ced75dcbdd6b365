"""Held-out abilities of a model through the engine on this machine, at temperature 0.

PYTHONPATH=src:. python -m training.evaluate_engine [-n 50] [--abilities arithmetic,copy]
"""

from __future__ import annotations

import argparse
import json

from civetta.engine.load import load_engine
from civetta.engine.protocol import Finished, GenerateRequest, TokenEvent
from civetta.options import ModelOptions, Settings
from civetta.types import SamplingParams
from training.data.encode import encode_text
from training.data.heldout import heldout

ABILITIES = "arithmetic,copy,json,tools,definitions,retrieval"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("-n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tokens", type=int, help="length of retrieval prompts")
    parser.add_argument("--abilities", default=ABILITIES)
    a = parser.parse_args()
    with load_engine(Settings(model=ModelOptions(model=a.model))) as engine:
        for ability in a.abilities.split(","):
            more = {"tokens": a.tokens} if a.tokens and ability == "retrieval" else {}
            items = heldout(ability, a.n, seed=a.seed, **more)
            right = sum(item.grade_text(answer(engine, item)) for item in items)
            print(json.dumps({"ability": ability, "right": right, "of": len(items)}), flush=True)


def answer(engine, item) -> str:  # type: ignore[no-untyped-def]
    request = GenerateRequest(
        request_id=f"{item.ability}-{item.index}",
        prompt_ids=tuple(encode_text(item.prompt)),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=item.max_tokens,
    )
    events = list(engine.submit(request))
    return "".join(e.text for e in events if isinstance(e, TokenEvent | Finished))


if __name__ == "__main__":
    main()
