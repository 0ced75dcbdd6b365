"""python -m training.trainer.run --phases start:300,main:2180 --state DIR --out DIR [--fast] …

Kept free of torch at import, because data workers import the main module.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train civetta-nano; goes on from --state.")
    parser.add_argument("--phases", default="start:300,main:2180", help="phase:until-step,…")
    parser.add_argument("--state", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of weights and log")
    parser.add_argument(
        "--pause-s", type=float, help="save the state and stop after, to go on later"
    )
    parser.add_argument("--decay-from", type=int, help="step from which the rate falls to the end")
    parser.add_argument("--sparse-from", type=int, default=600, help="step of sparse attention")
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a batch")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on all learning rates")
    parser.add_argument("--fast", action="store_true", help="compile parts of the network")
    parser.add_argument("--eval", type=int, default=0, help="held-out items an ability at the end")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = _arguments()
    from training.trainer.loop import train

    train(ARGUMENTS)
