"""What grammars cost: compiling, the mask of a token, choosing under a mask, and a whole reply.

    python benchmarks/grammar.py [--out FILE]

Vocabularies: civetta-nano's own, and one of 248,320 tokens made of it by joining tokens in pairs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from civetta.chat.message import ToolSpec
from civetta.chat.schema import schema_grammar
from civetta.chat.tokenizer import Tokenizer
from civetta.chat.tool_grammar import call_tail_grammar
from civetta.checkpoint.source import open_checkpoint
from civetta.decode.grammars import Grammars
from civetta.decode.history import TokenHistory
from civetta.decode.mask import TokenMask
from civetta.decode.sampler import SampleRow, sample_row
from civetta.engine.load import load_engine
from civetta.engine.protocol import GenerateRequest
from civetta.errors import CivettaError
from civetta.model.embedded import embedded_model_path
from civetta.options import ModelOptions, Settings
from civetta.types import Constraint, Grammar, SamplingParams

WIDE = 248_320
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "age", "tags", "kind"],
}
ANSWER = '{"name": "Ada Lovelace", "age": 36, "tags": ["maths", "engines"], "kind": "bird"}'
TOOLS = [
    ToolSpec(
        name=f"tool_{t}",
        parameters={
            "properties": {
                "path": {"type": "string"},
                "count": {"type": "integer"},
                "items": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["path"],
        },
    )
    for t in range(30)
]
CALL = (
    "\n<function=tool_17>\n<parameter=path>\nsrc/a.py\nand more text\n</parameter>\n"
    '<parameter=items>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>'
)
GRAMMARS = {
    "json_object": (schema_grammar({"type": "object"}, strict=False, param="x"), ANSWER),
    "json_schema, 4 properties": (schema_grammar(SCHEMA, strict=True, param="x"), ANSWER),
    "30 tools": (Grammar(kind="lark", text=call_tail_grammar(TOOLS)), CALL),
    "regex": (Grammar(kind="regex", text="[0-9]{3}-[a-z]{1,40}"), "123-something"),
}
HOSTILE = {
    "nested 60 deep": lambda: _nested(60),
    "1,000 enum values": lambda: {"enum": [f"value number {i}" for i in range(1000)]},
    "5,000 properties": lambda: {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    "minLength 100,000": lambda: {"type": "string", "minLength": 100_000},
    "pattern (a{1,1000}){1,1000}": lambda: {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    "pattern of 200 alternatives, twice": lambda: {
        "type": "string",
        "pattern": "^(" + "|".join(f"[a-z]*{i}[a-z]*" for i in range(200)) + "){2,50}$",
    },
    "allOf of 60 anyOfs of 8": lambda: {
        "allOf": [
            {"anyOf": [{"properties": {f"a{i}_{j}": {"type": "string"}}} for j in range(8)]}
            for i in range(60)
        ]
    },
    "anyOf of 1,000 objects": lambda: {
        "anyOf": [
            {"type": "object", "properties": {"k": {"const": i}, f"p{i}": {"type": "integer"}}}
            for i in range(1000)
        ]
    },
    "$ref to itself": lambda: {"$ref": "#"},
    "arrays of arrays, 100,000 items": lambda: {
        "type": "array",
        "minItems": 100_000,
        "items": {"type": "array", "minItems": 100_000},
    },
    "multipleOf 0.0000001": lambda: {"type": "number", "multipleOf": 1e-7},
}


def _nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(depth - 1):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def wide(tokenizer: Tokenizer) -> Any:
    """A tokenizer of WIDE tokens; it encodes as the narrow one does."""
    narrow = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    words = [t for t in narrow if 2 <= len(t) <= 8 and t.isascii() and not t.startswith(b"<")]
    pairs = itertools.product(words, words)
    texts = narrow + [a + b for a, b in itertools.islice(pairs, WIDE - len(narrow))]
    return SimpleNamespace(
        vocab_size=len(texts),
        token_bytes=texts.__getitem__,
        encode=tokenizer.encode,
        control_ids=tokenizer.control_ids,
        eog_ids=tokenizer.eog_ids,
        eos_id=tokenizer.eos_id,
    )


def measured(tokenizer: Any) -> list[dict[str, Any]]:
    """Compile and mask times of each grammar."""
    began = time.perf_counter()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammars.matcher(Grammar(kind="regex", text="x"))
    first_s = time.perf_counter() - began
    rows = [{"grammar": "(reading the vocabulary, once)", "compile_ms": first_s * 1e3}]
    for name, (grammar, text) in GRAMMARS.items():
        began = time.perf_counter()
        grammars.matcher(grammar)
        compile_s = time.perf_counter() - began
        began = time.perf_counter()
        matcher = grammars.matcher(grammar)
        copy_s = time.perf_counter() - began
        times = []
        for token_id in tokenizer.encode(text):
            began = time.perf_counter()
            matcher.allowed()
            times.append(time.perf_counter() - began)
            assert matcher.take(token_id), name
        rows.append(
            {
                "grammar": name,
                "compile_ms": compile_s * 1e3,
                "copy_ms": copy_s * 1e3,
                "mask_median_us": statistics.median(times) * 1e6,
                "mask_mean_us": statistics.fmean(times) * 1e6,
                "mask_most_us": max(times) * 1e6,
            }
        )
    return rows


def choosing(size: int) -> list[dict[str, Any]]:
    """One choice from logits of that size, without and with masks."""
    rng = np.random.default_rng(0)
    logits_V = rng.normal(0, 3, size).astype(np.float32)
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=1)
    row = SampleRow(params=params, position=9, history=TokenHistory([1], repeat_last_n=64))
    masks = {
        "no mask": None,
        "all but three tokens": TokenMask(banned_N=np.array([1, 2, 3])),
        "99 % allowed": TokenMask(allowed_V=rng.random(size) < 0.99),
        "0.1 % allowed": TokenMask.of(rng.random(size) < 0.001),
        "one token": TokenMask(allowed_N=np.array([7])),
    }
    rows = []
    for name, mask in masks.items():
        times = []
        for _ in range(60):
            began = time.perf_counter()
            sample_row(logits_V, replace(row, mask=mask))
            times.append(time.perf_counter() - began)
        rows.append({"mask": name, "choice_us": statistics.median(times) * 1e6})
    return rows


def hostile(tokenizer: Any) -> list[dict[str, Any]]:
    """Schemas made to cost much: what they take until refused, or until the first mask."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammars.matcher(Grammar(kind="regex", text="x"))
    rows = []
    for name, make in HOSTILE.items():
        began = time.perf_counter()
        try:
            matcher = grammars.matcher(schema_grammar(make(), strict=False, param="x"))
            outcome = "compiled"
            for token_id in tokenizer.encode('{"a": "'):
                if not matcher.take(token_id):
                    break
                matcher.allowed()
        except CivettaError as error:
            outcome = error.message[:90]
        rows.append({"schema": name, "ms": (time.perf_counter() - began) * 1e3, "outcome": outcome})
    return rows


def replies() -> list[dict[str, Any]]:
    """200 tokens of civetta-nano, one user, free and under a grammar that admits any text."""
    settings = Settings(model=ModelOptions(threads=1))
    bound = Constraint(grammar=Grammar(kind="regex", text="(?s:.){1500,3000}"))
    kinds: dict[str, dict[str, Any]] = {
        "free": {"ignore_eos": True},
        "under a grammar": {"constraint": bound},
    }
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    with load_engine(settings) as engine:
        prompt = tuple(engine.tokenizer.encode("The quick brown fox"))
        params = SamplingParams(temperature=0.7, top_k=20, seed=3)
        for _ in range(6):  # in turn, so that other work on the machine meets both
            for name, more in kinds.items():
                asked = GenerateRequest(
                    request_id=name, prompt_ids=prompt, sampling=params, max_tokens=200, **more
                )
                usage = list(engine.submit(asked))[-1].usage
                assert usage.completion_tokens == 200, name
                rates[name].append(usage.completion_tokens / usage.decode_s)
    return [
        {"reply": name, "median_tokens_a_second": statistics.median(found), "best": max(found)}
        for name, found in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write all figures as JSON")
    out = parser.parse_args().out
    nano = Tokenizer.from_gguf(open_checkpoint(embedded_model_path()).metadata)
    big = wide(nano)
    figures: dict[str, Any] = {}
    for tokenizer in (nano, big):
        figures[f"grammars, {tokenizer.vocab_size} tokens"] = measured(tokenizer)
    figures[f"choosing from {WIDE} logits"] = choosing(WIDE)
    figures[f"hostile schemas, {big.vocab_size} tokens"] = hostile(big)
    figures["replies of civetta-nano, one thread"] = replies()
    for title, rows in figures.items():
        print(f"\n{title}")
        for row in rows:
            shown = [f"{v:10.1f}" if isinstance(v, float) else f"{v:<36}" for v in row.values()]
            print("  ".join(shown), "  ", ", ".join(list(row)[1:]))
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
