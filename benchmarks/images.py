"""Images: what encoding costs, and how long it holds others up.

    python benchmarks/images.py encode [--threads 2] [--layers 27] [--save FILE]
    python benchmarks/images.py stall [--threads 2] [--processor-time] [--save FILE]

encode: seconds of the embedded tower and of one of the real size (random weights, 1,152 wide), with
attention by torch on one thread and by the compiled op, in turn.
stall: the longest time between two tokens of a reply while another user's picture is encoded, against
the same reply alone. On a busy machine ask for processor time: that of the thread that works, on one.

Runs the embedded model. image_transitions.py asks whether images leave text as fast.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from drafting_bench import Bench
from PIL import Image

from civetta.chat.image_source import bytes_part
from civetta.chat.images import cut_patches
from civetta.chat.message import Conversation, Message, TextPart
from civetta.engine.client import ChatClient, ReplyDelta, ReplyOptions
from civetta.engine.load import load_trunk_only
from civetta.engine.load_vision import find_vision
from civetta.kernels.select import REFERENCE, select
from civetta.model.embedded import embedded_model_path
from civetta.model.vision import VisionTower
from civetta.model.vision_build import build_tower
from civetta.model.vision_config import VisionConfig
from civetta.model.vision_weights import Affine, Norm, VisionBlockWeights, VisionWeights
from civetta.options import ModelOptions, Settings, VisionOptions
from civetta.types import SamplingOverrides

if TYPE_CHECKING:
    from civetta.engine.engine import Engine
    from civetta.engine.protocol import GenerateRequest

LONG_TEXT = "The red fox ran over the green hill and down to the river to drink. " * 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("encode", "stall"):
        command = commands.add_parser(name)
        command.add_argument("--threads", type=int, default=os.cpu_count() or 1)
        command.add_argument("--save", type=Path)
        if name == "encode":
            command.add_argument("--layers", type=int, default=27)
            command.add_argument("--rounds", type=int, default=3)
        else:
            command.add_argument("--processor-time", action="store_true")
    a = parser.parse_args()
    run = {"encode": encode, "stall": stall}[a.command]
    text = json.dumps({"command": a.command, **run(a)}, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n", encoding="utf-8")


# ---- requests ---------------------------------------------------------------------------------------


def conversation(engine: Engine, kind: str, tokens: int) -> GenerateRequest:
    """A long text or two pictures with a question, greedy, of a set length."""
    parts: list[Any] = [TextPart(text="What colours are these? ")]
    if kind == "text":
        parts = [TextPart(text=LONG_TEXT + "What did the fox do?")]
    else:
        parts += [bytes_part(png(384, 288, seed), index=seed) for seed in (1, 2)]
    options = ReplyOptions(
        sampling=SamplingOverrides(temperature=0), max_tokens=tokens, ignore_eos=True
    )
    message = Message(role="user", parts=tuple(parts))
    return ChatClient(engine).prepare(Conversation(messages=(message,)), options).request


def png(width: int, height: int, seed: int) -> bytes:
    """Blocks of random colours."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    picture = Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


# ---- encode -----------------------------------------------------------------------------------------


def encode(a: argparse.Namespace) -> dict[str, Any]:
    ops = select("cpu", a.threads)
    before = replace(ops, attend_image=REFERENCE.attend_image)
    checked = load_trunk_only(Settings(model=ModelOptions(threads=a.threads))).checked
    vision = find_vision(VisionOptions(), checked)
    assert vision is not None
    report: dict[str, Any] = {"threads": a.threads}
    towers = {
        "embedded": [build_tower(vision, dtype=torch.float32, ops=o) for o in (before, ops)],
        f"1,152 wide, {a.layers} layers": real_towers(a.layers, (before, ops)),
    }
    for name, (torch_tower, tower) in towers.items():
        for width, height in ((256, 256), (1024, 768)):
            seconds: dict[str, list[float]] = {"torch": [], "compiled": []}
            picture = Image.open(io.BytesIO(png(width, height, 1))).convert("RGB")
            image = cut_patches([picture], tower.config.rules)
            for _ in range(a.rounds):
                for side, one in (("torch", torch_tower), ("compiled", tower)):
                    began_s = time.perf_counter()
                    one.encode(image)
                    seconds[side].append(time.perf_counter() - began_s)
            report[f"{name}, {width} x {height}"] = {
                f"{side}_s": [round(s, 3) for s in found] for side, found in seconds.items()
            }
            print(name, width, height, seconds, file=sys.stderr)
    return report


def real_towers(layers: int, tables: Any) -> list[VisionTower]:
    """Towers of the real width with shared random weights, one a table of ops."""
    config = VisionConfig(
        layers=layers,
        hidden=1152,
        heads=16,
        mlp_width=4304,
        patch=16,
        merge=2,
        temporal=2,
        positions=2304,
        out_width=2560,
    )
    made = torch.Generator().manual_seed(0)

    def affine(rows: int, cols: int) -> Affine:
        w = (torch.randn(rows, cols, generator=made) * 0.02).to(torch.bfloat16)
        return Affine(w=w, bias_N=torch.zeros(rows))

    def norm() -> Norm:
        return Norm(gain_D=torch.ones(config.hidden), shift_D=torch.zeros(config.hidden))

    d, merged = config.hidden, config.merged
    block = VisionBlockWeights(
        norm1=norm(),
        qkv=affine(3 * d, d),
        out=affine(d, d),
        norm2=norm(),
        fc1=affine(config.mlp_width, d),
        fc2=affine(d, config.mlp_width),
    )
    weights = VisionWeights(
        patch=affine(d, 3 * config.temporal * config.patch**2),
        positions_LD=torch.randn(config.positions, d, generator=made),
        blocks=(block,) * layers,
        merger_norm=norm(),
        merger_fc1=affine(merged, merged),
        merger_fc2=affine(config.out_width, merged),
    )
    return [VisionTower(config, weights, ops, torch.float32) for ops in tables]


# ---- stall ------------------------------------------------------------------------------------------


def stall(a: argparse.Namespace) -> dict[str, Any]:
    """Gaps between a reply's tokens, in milliseconds: alone, and while a picture is encoded."""
    found = worked_gaps() if a.processor_time else waited_gaps(a)
    return {
        name: {
            "gaps": len(gaps),
            "median_ms": round(statistics.median(gaps), 2),
            "p99_ms": round(float(np.percentile(gaps, 99)), 2),
            "longest_ms": round(max(gaps), 2),
        }
        for name, gaps in found.items()
    }


def worked_gaps() -> dict[str, list[float]]:
    """What one thread works between two tokens, in milliseconds of its processor time.

    The gap with the prefill of the picture's prompt is apart: no encoding is in it, and a text as long
    would take the same; a server bounds it by --prefill-chunk.
    A busy machine does not move it much; what is left out is the wait for the interpreter while the
    picture is decoded on another thread.
    """
    bench = Bench(str(embedded_model_path()), mode="off", threads=1, context=2048, cpu_time=True)
    with bench.engine(2, "off") as engine:
        asked = conversation(engine, "text", 400)
        shown = [picture_request(engine, 10 + number) for number in range(2)]
    loop = bench.loop(2, "off")
    gaps: dict[str, list[float]] = {"alone": [], "beside an image": [], "beside its prefill": []}
    for number in range(4):
        loop.submit(replace(asked, request_id=f"r{number}"))
        end = loop.stats().generated_tokens_total + 400 + number % 2
        while not loop.stats().session_tokens:
            loop.step()
        if number % 2:
            loop.submit(shown[number // 2])
        began_s, before = bench.clock(), loop.stats()
        while before.generated_tokens_total < end:
            loop.step()
            now_s, now = bench.clock(), loop.stats()
            if now.generated_tokens_total > before.generated_tokens_total:
                prefilled = now.prompt_tokens_total > before.prompt_tokens_total
                name = list(gaps)[number % 2 + prefilled]
                gaps[name].append(1e3 * (now_s - began_s))
                began_s, before = now_s, now
    return gaps


def picture_request(engine: Engine, seed: int) -> GenerateRequest:
    """A picture of 1024 x 768 with a question, for one token."""
    picture = bytes_part(png(1024, 768, seed), index=1)
    message = Message(role="user", parts=(picture, TextPart(text="What is it?")))
    asked = Conversation(messages=(message,))
    return ChatClient(engine).prepare(asked, ReplyOptions(max_tokens=1)).request


def waited_gaps(a: argparse.Namespace) -> dict[str, list[float]]:
    """What a client waits between two tokens, in milliseconds."""
    bench = Bench(str(embedded_model_path()), mode="off", threads=a.threads, context=2048)
    alone, beside = [], []
    with bench.engine(2, "off") as engine:
        client = ChatClient(engine)
        asked = conversation(engine, "text", 400)
        for number in range(4):
            gaps = alone if number % 2 == 0 else beside
            stream = engine.submit(replace(asked, request_id=f"r{number}"))
            events = iter(stream)
            while type(next(events)).__name__ != "TokenEvent":
                pass
            if number % 2:
                picture = bytes_part(png(1024, 768, 10 + number), index=1)
                message = Message(role="user", parts=(picture, TextPart(text="What is it?")))
                other = client.generate_sync(
                    Conversation(messages=(message,)), ReplyOptions(max_tokens=1)
                )
            last_s = time.perf_counter()
            for event in events:
                now_s = time.perf_counter()
                if type(event).__name__ == "TokenEvent":
                    gaps.append(1e3 * (now_s - last_s))
                last_s = now_s
            if number % 2:
                assert any(isinstance(item, ReplyDelta) for item in other)
    return {"alone": alone, "beside an image": beside}


if __name__ == "__main__":
    main()
