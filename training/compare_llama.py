"""Compares greedy text of the GGUF file in civetta and in llama.cpp.

PYTHONPATH=src:. python -m training.compare_llama --binary build/bin/llama-simple [-n 12] [-m FILE]

`llama-simple` is an example program of llama.cpp (the vendored tree of llama-cpp-python 0.3.36 has
this architecture). Prints how many replies are the same, and where the first others part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from civetta.engine.load import load_engine
from civetta.engine.protocol import Finished, GenerateRequest, TokenEvent
from civetta.model.embedded import embedded_model_path
from civetta.options import ModelOptions, Settings
from civetta.types import SamplingParams
from training.data.encode import encode_text
from training.data.heldout import EvalItem, heldout

ABILITIES = ("arithmetic", "definitions", "json", "copy", "tools", "retrieval", "stories")
TOKENS = 80
MARKS = ("<|im_end|>", "<|endoftext|>")


def main() -> None:
    """Ask both about the same items."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("-m", "--model", default=str(embedded_model_path()))
    parser.add_argument("-n", type=int, default=2, help="items an ability")
    parser.add_argument("--threads", type=int, default=0)
    a = parser.parse_args()
    settings = Settings(model=ModelOptions(model=a.model, threads=a.threads))
    with load_engine(settings) as engine:
        for ability in ABILITIES:
            same, parted = 0, []
            for item in heldout(ability, a.n, seed=5, thinking=None):
                request = GenerateRequest(
                    request_id=str(item.index),
                    prompt_ids=tuple(encode_text(item.prompt)),
                    sampling=SamplingParams(temperature=0.0),
                    max_tokens=TOKENS,
                )
                events = [e for e in engine.submit(request) if isinstance(e, TokenEvent | Finished)]
                mine, theirs = "".join(e.text for e in events), _llama(a.binary, a.model, item)
                same += mine == theirs
                if mine != theirs:
                    parted.append([mine[:120], theirs[:120]])
            line = {"ability": ability, "same": same, "of": a.n, "parted": parted[:1]}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


def _llama(binary: str, model: str, item: EvalItem) -> str:
    """The reply of llama.cpp: what it prints behind the prompt, up to its end mark."""
    command = [binary, "-m", model, "-ngl", "0", "-n", str(TOKENS), item.prompt]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    text = done.stdout.removeprefix(item.prompt) if done.stdout.startswith(item.prompt) else ""
    text = text or done.stdout.rsplit(item.prompt[-40:], 1)[-1]
    for mark in MARKS:
        text = text.split(mark)[0]
    return text.removesuffix("\n")


if __name__ == "__main__":
    main()
