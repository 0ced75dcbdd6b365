"""python -m training.trainer.run_stage STAGE --start DIR --out DIR --steps N […]

Kept free of torch at import, because data workers import the main module.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one stage after the text model.")
    parser.add_argument("stage", choices=("see", "both", "count", "pick", "names", "draft"))
    parser.add_argument(
        "--start", type=Path, required=True, help="folder of .safetensors or .gguf files"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of weights and log")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--state", type=Path, help="folder of the checkpoint to go on from")
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a batch")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on all learning rates")
    parser.add_argument("--fast", action="store_true", help="compile parts of the network")
    parser.add_argument("--eval", type=int, default=0, help="held-out items an ability at the end")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the sizes of the tests")
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = _arguments()
    from training.trainer.stages import run_stage

    run_stage(ARGUMENTS)
