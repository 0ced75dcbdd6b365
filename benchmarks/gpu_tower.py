"""The vision tower on a GPU: bfloat16 rows against float32 ones, and what an image takes.

    python benchmarks/gpu_tower.py [--layers 27] [--device cuda] [--save FILE]

A tower of the real width with random weights, and the embedded one. Errors are relative L2 of the GPU's
rows against the compiled ones of the CPU in float32, on random pixels; the bound is 1 % in bfloat16.
Times are medians of five, of all of an image's steps and of its longest single one, which is what
others wait between two tokens. 30 s on one H200.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from images import png, real_towers
from PIL import Image

from civetta.chat.images import PreparedImage, cut_patches
from civetta.kernels.select import select
from civetta.model.embedded import embedded_model_path
from civetta.model.place import place_tower
from civetta.model.vision import VisionTower
from civetta.model.vision_build import build_tower, check_mmproj, find_mmproj

if TYPE_CHECKING:
    from civetta.kernels.ops import Ops
    from civetta.model.vision_config import VisionConfig

SIZES = ((256, 256), (1024, 768), (32, 896))
BOUND = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=27, help="of the tower that is timed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    device = torch.device(a.device)
    cpu = select("cpu", 4)
    sidecar = find_mmproj(embedded_model_path())
    assert sidecar is not None, "the package has one"
    own = build_tower(check_mmproj(sidecar), dtype=torch.float32, ops=cpu)
    report: dict[str, Any] = {"device": a.device}
    for name, plain in {"embedded": own, "real width, 4 layers": real_towers(4, (cpu,))[0]}.items():
        report[name] = errors(plain, device)
        print(name, report[name], flush=True)
    timed = on_device(real_towers(a.layers, (cpu,))[0], device, torch.bfloat16)
    report[f"real width, {a.layers} layers"] = times(timed, device)
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n", encoding="utf-8")


def on_device(plain: VisionTower, device: torch.device, dtype: torch.dtype) -> VisionTower:
    """The same weights as build_tower places them; on a CPU its ops, with what a GPU attends to."""
    attended = torch.float16 if dtype == torch.bfloat16 else dtype
    weights = plain.weights
    if device.type != "cpu":
        weights = place_tower(weights, device, dtype)
    return VisionTower(plain.config, weights, _ops(device), dtype, attended=attended)


def _ops(device: torch.device) -> Ops:
    if device.type == "cpu":
        from civetta.kernels.select import REFERENCE

        return REFERENCE
    from civetta.kernels.gpu import gpu_ops

    return gpu_ops()


def errors(plain: VisionTower, device: torch.device) -> dict[str, float]:
    """Relative L2 by size and dtype."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        placed = on_device(plain, device, dtype)
        for width, height in SIZES:
            image = picture(width, height, plain.config)
            right = plain.encode(image)
            rows = placed.encode(image).float().cpu()
            error = float((rows - right).norm() / right.norm())
            found[f"{width} x {height} {str(dtype).removeprefix('torch.')}"] = error
            assert dtype == torch.float32 or error <= BOUND, (width, height, error)
    return found


def times(tower: VisionTower, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds of an image and of its longest step."""
    found = {}
    for width, height in SIZES:
        image = picture(width, height, tower.config)
        tower.encode(image)
        whole, longest = [], []
        for _ in range(5):
            steps = steps_s(tower, image, device)
            whole.append(1e3 * sum(steps))
            longest.append(1e3 * max(steps))
        found[f"{width} x {height}"] = {
            "ms": round(statistics.median(whole), 2),
            "longest_step_ms": round(statistics.median(longest), 2),
        }
    return found


def steps_s(tower: VisionTower, image: PreparedImage, device: torch.device) -> list[float]:
    """Seconds of each step, the device's work in."""
    encoding, found, done = tower.begin(image), [], False
    while not done:
        began_s = time.perf_counter()
        done = encoding.advance()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began_s)
    return found


def picture(width: int, height: int, config: VisionConfig) -> PreparedImage:
    """Blocks of random colours, as patches."""
    return cut_patches([Image.open(io.BytesIO(png(width, height, 1))).convert("RGB")], config.rules)


if __name__ == "__main__":
    main()
