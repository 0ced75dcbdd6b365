"""What the programs about drafting share: prompts, ways to sample, and engines on one model.

A `Bench` loads a model with its draft head, and has the same network without it; `engine` makes
engines that draft in a set way, with or without a cache of states. Alone it prints nothing.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from drafting_turns import step_loop

from civetta.cache.off import NoCache
from civetta.cache.setup import build_cache, plan_cache
from civetta.decode.lookup import TextIndex
from civetta.engine.calibrate import calibrate
from civetta.engine.engine import Engine
from civetta.engine.load import load_trunk_only
from civetta.engine.load_vision import find_vision, image_support
from civetta.engine.memory import state_sizes
from civetta.engine.protocol import Finished, GenerateRequest, ModelInfo, TokenEvent
from civetta.engine.speculation import Drafting
from civetta.engine.trunk_model import TrunkModel
from civetta.kernels.ops import PAGE_TOKENS
from civetta.model.vision_build import LazyTower
from civetta.options import (
    CacheOptions,
    DraftingOptions,
    EngineOptions,
    ModelOptions,
    Settings,
    VisionOptions,
)
from civetta.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from civetta.engine.loop import StepLoop

PROSE = [
    "Tell me a story about a fox who finds a lantern.",
    "What is a river?",
    "Explain what rain is.",
    "Tell me a story about two friends and a boat.",
    "What is a mountain?",
    "Write about a quiet village in winter.",
    "What does a baker do?",
    "Tell me a story about a lost key.",
    "Describe a garden in spring.",
    "Why do birds sing?",
    "Tell me about the moon.",
    "What is a library?",
]
REPEATS = [
    "Repeat this ten times: the red fox runs over the green hill and down to the river.",
    "Copy this text: one two three four five six one two three four five six one two three",
    "Write the list again: apple, pear, plum, apple, pear, plum, apple, pear, plum, apple",
    "Count: 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3",
]
NOISE = [
    "xq wv 81 plim kors, ute? 7 7 dwa",
    "Frob the glim and wug it twice, then slithy?",
    "9f3a 77c1 e02b 5d5d 1c9e",
    "zzt brr kho! lalu menti ore fa",
    "Qeta, roni, uls: vim pad kel?",
    "how wu 12 ni sept dorr 3 ly",
    "Yon tilth, mirk and fey; ullage?",
    "a1b2 c3 d4e5 f6, g7h8 i9",
]
PROMPTS = PROSE + REPEATS
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "T 0.7": SamplingParams(temperature=0.7, seed=17),
    "T 1.0, filters, penalties": SamplingParams(
        temperature=1.0,
        seed=5,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repeat_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.2,
    ),
}
KINDS = {
    "prose": (PROSE, SAMPLINGS["greedy"]),
    "repetitive": (REPEATS, SAMPLINGS["greedy"]),
    "noise": (NOISE, SamplingParams(temperature=1.5, seed=3)),
}
"""Prompts and sampling by kind; replies to noise at T 1.5 can hardly be foreseen."""


class Bench:
    """A model without and with its head, the weights shared, and engines on both.

    `cpu_time` measures the step thread's processor time, with one thread.
    """

    def __init__(
        self, model: str, *, mode: str = "mtp", threads: int, context: int, cpu_time: bool = False
    ) -> None:
        self.threads, self.context = 1 if cpu_time else threads, context
        self.clock = time.thread_time if cpu_time else time.perf_counter
        torch.set_num_threads(self.threads)
        self.with_head = self._load(model, "mtp" if mode == "mtp" else "off")
        trunk = self.with_head.trunk
        self.plain = replace(self.with_head, trunk=trunk.over(trunk.ops, lambda rows: rows))
        self.costs = calibrate(self.with_head.trunk, self.clock)

    def spoil_drafts(self) -> None:
        """Shift every draft by one id, the head's and those from the text: as sure as before, and
        never right. For the rest of the process."""
        head, found = self.with_head.trunk.head, TextIndex.continuation
        vocab = self.with_head.trunk.config.vocab

        def shifted(text: TextIndex, most: int) -> tuple[tuple[int, ...], int]:
            ids, match = found(text, most)
            return tuple((i + 1) % vocab for i in ids), match

        TextIndex.continuation = shifted  # type: ignore[method-assign]
        if head is not None:
            said = head._logits
            head._logits = lambda x_BSD: said(x_BSD).roll(1, dims=-1)  # type: ignore[method-assign]

    def _load(self, model: str, mode: str):  # type: ignore[no-untyped-def]
        options = ModelOptions(model=model, threads=self.threads)
        return load_trunk_only(Settings(model=options, drafting=DraftingOptions(speculative=mode)))

    def engine(
        self, users: int, mode: str, most: int = 7, *, fixed: bool = False, cache_bytes: int = 0
    ) -> Engine:
        """An engine for so many users at a time; `mode` "off", "mtp" or "lookup"."""
        loaded = self.plain if mode == "off" else self.with_head
        drafting = self._drafting(mode, most, fixed=fixed)
        options = CacheOptions(cache="on" if cache_bytes else "off", cache_ram_bytes=cache_bytes)
        sizes = state_sizes(loaded.trunk.state_shape, loaded.trunk.dtype)
        plan = plan_cache(options, sizes.page_bytes, available_bytes=0)
        pages = users * -(-self.context // PAGE_TOKENS) + plan.spare_pages
        store = loaded.trunk.store(sessions=users, context_tokens=self.context, pages=pages)
        cache = NoCache() if not cache_bytes else build_cache(options, plan, store, model=str)
        vision = find_vision(VisionOptions(), loaded.checked)
        images = None
        if vision is not None:
            images = image_support(vision, loaded.checked, loaded.tokenizer)
        return Engine(
            TrunkModel(loaded.trunk, store, _tower(loaded)),
            replace(_info(loaded, self.context), images=images),
            tokenizer=loaded.tokenizer,
            template=loaded.template,
            options=EngineOptions(sessions=users, max_pending=1000),
            clock=self.clock,
            cache=cache,
            drafting=drafting,
        )

    def loop(self, users: int, mode: str, most: int = 7, *, fixed: bool = False) -> StepLoop:
        """The step loop of such an engine alone, for a caller that takes the steps itself."""
        loaded = self.plain if mode == "off" else self.with_head
        return step_loop(
            loaded.trunk,
            self._drafting(mode, most, fixed=fixed),
            users=users,
            context=self.context,
            clock=self.clock,
            tower=_tower(loaded),
        )

    def _drafting(self, mode: str, most: int, *, fixed: bool = False) -> Drafting | None:
        if mode == "off" or not most:
            return None
        return Drafting(
            mode="mtp" if mode == "mtp" else "lookup",
            most=most,
            head=self.with_head.trunk.head if mode == "mtp" else None,
            fixed=fixed,
            launches=self.costs[0],
            steps=self.costs[1] if mode == "mtp" else (),
        )

    def requests(
        self, texts: Sequence[str], sampling: SamplingParams, tokens: int, **fields: Any
    ) -> list[GenerateRequest]:
        """Chat prompts with thinking off; end tokens do not end, so that lengths are alike."""
        tokenizer = self.plain.tokenizer
        assert tokenizer is not None
        form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        return [
            GenerateRequest(
                request_id=f"r{i}",
                prompt_ids=tuple(tokenizer.encode(form.format(text))),
                sampling=sampling,
                max_tokens=tokens,
                ignore_eos=True,
                **fields,
            )
            for i, text in enumerate(texts)
        ]


def run_all(
    engine: Engine, requests: Sequence[GenerateRequest]
) -> list[tuple[list[int], Finished]]:
    """Token ids and end of each request, all queued at once."""
    out = []
    for stream in [engine.submit(request) for request in requests]:
        events = list(stream)
        assert isinstance(events[-1], Finished)
        out.append(([e.token_id for e in events if isinstance(e, TokenEvent)], events[-1]))
    return out


def with_random_head(model: Path, folder: Path) -> Path:
    """The folder's files, and a second safetensors file with random `mtp.` tensors."""
    from civetta.model.tiny import tiny_tensors, to_bf16, write_safetensors

    config = json.loads((model / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    for file in model.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file.resolve())
    (folder / "model-00001-of-00002.safetensors").symlink_to(
        (model / "model.safetensors").resolve()
    )
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: v for n, v in tiny_tensors(config).items() if n.startswith("mtp.")}
    name = "model-00002-of-00002.safetensors"
    write_safetensors(folder / name, {n: ("BF16", to_bf16(v)) for n, v in tensors.items()})
    from civetta.checkpoint.safetensors import read_safetensors_folder

    held = read_safetensors_folder(model).tensors
    index = dict.fromkeys(held, "model-00001-of-00002.safetensors") | dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def _tower(loaded: Any) -> LazyTower | None:
    vision = find_vision(VisionOptions(), loaded.checked)
    if vision is None:
        return None
    return LazyTower(vision, dtype=loaded.trunk.dtype, ops=loaded.ops)


def _info(loaded: Any, context: int) -> ModelInfo:
    return ModelInfo(
        model_id="bench",
        path=str(loaded.path),
        context_tokens=context,
        vocab_size=loaded.trunk.config.vocab,
        parameters=0,
        format="",
        device="cpu",
        dtype="f32",
        created_s=0,
        has_tokenizer=loaded.tokenizer is not None,
    )
