"""Where do a short launch and a long one first differ in bits? Prints every op that does, in order.

python benchmarks/gpu_trace.py [-m MODEL]
"""

from __future__ import annotations

# ruff: noqa: ARG005
import sys
from typing import TYPE_CHECKING, Any

import torch
from gpu_answers import trunk_of

from civetta.kernels.fused import mixture as mixture_module
from civetta.kernels.fused import streams as streams_module
from civetta.model.build import check_checkpoint
from civetta.model.embedded import embedded_model_path
from civetta.model.gpu import layers as layers_module

if TYPE_CHECKING:
    from collections.abc import Callable

Seen = list[tuple[str, torch.Tensor]]


def watch(
    module: Any, name: str, seen: Seen, outputs: Callable[..., dict[str, torch.Tensor]]
) -> None:
    call = getattr(module, name)

    def run(*args: Any, **named: Any) -> Any:
        result = call(*args, **named)
        for key, tensor in outputs(args, named, result).items():
            seen.append(
                (f"{module.__name__.rpartition('.')[2]}.{name} {key}", tensor.clone().cpu())
            )
        return result

    setattr(module, name, run)


def main() -> None:
    seen: Seen = []
    watch(layers_module, "enter", seen, lambda a, n, r: {"x": a[0], "normed": r.normed})
    watch(layers_module, "mix", seen, lambda a, n, r: {"h": r})
    watch(streams_module, "product", seen, lambda a, n, r: {f"y {a[1].shape}": a[2]})
    watch(layers_module, "product", seen, lambda a, n, r: {f"y {a[1].shape}": a[2]})
    watch(mixture_module, "product", seen, lambda a, n, r: {f"y {a[1].shape} {list(n)}": a[2]})
    watch(layers_module, "delta", seen, lambda a, n, r: {"y": r})
    watch(layers_module, "attend", seen, lambda a, n, r: {"y": r})
    checked = check_checkpoint(embedded_model_path())
    ids = [(i * 37) % 6000 for i in range(700)]
    for dtype in (torch.bfloat16, torch.float32):
        trunk = trunk_of(checked, dtype, "cuda")
        trunk._graphs = None
        for first, short in ((0, 50), (0, 10), (0, 1), (600, 50), (600, 8), (600, 1)):
            runs = []
            for rows in (100, short):
                store = trunk.store(sessions=1, context_tokens=1024)
                session = store.open()
                if first:
                    trunk.forward(session, ids[:first], "none")
                seen.clear()
                trunk.forward(session, ids[first : first + rows], "all")
                runs.append(list(seen))
            print(f"{dtype}, {short} rows against 100 at {first}: {len(runs[0])} ops")
            shown = 0
            for (name, long), (_, few) in zip(*runs, strict=True):
                each = long.shape[0] // 100
                if each == 0 or shown >= 4:
                    continue
                a, b = long[: short * each].float(), few[: short * each].float()
                if not torch.equal(a, b):
                    shown += 1
                    bad = (a != b).flatten(1).any(1).nonzero().flatten().tolist()
                    print(
                        "  ",
                        name,
                        tuple(few.shape),
                        float((a - b).abs().max() / a.abs().max()),
                        len(bad),
                        bad[:6],
                    )


if __name__ == "__main__":
    sys.exit(main())
