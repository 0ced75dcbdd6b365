"""`python -m training.data.preview`: prints samples, held-out items, or counts of a phase."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from training.data.abilities import ABILITIES
from training.data.curriculum import plan
from training.data.draw import Draw, seeded
from training.data.encode import encode, marks
from training.data.heldout import heldout
from training.data.mixture import stream
from training.data.sample import Chat


def show(ability: str, count: int, room: int, seed: int, pictures: Path | None) -> None:
    """Print training samples; what carries loss is shown again, between bars."""
    tokenizer = marks().tokenizer
    for index in range(count):
        item = ABILITIES[ability](Draw(rng=seeded("preview", seed, ability, index), room=room))
        sample = encode(item)
        print(f"--- {ability} {index}: {len(sample.ids)} tokens")
        print(tokenizer.decode(sample.ids.tolist(), skip_special_tokens=False))
        learned = sample.ids[sample.weight == 1.0].tolist()
        print(f"|{tokenizer.decode(learned, skip_special_tokens=False)}|")
        if pictures and isinstance(item, Chat):
            for number, pixels in enumerate(item.images):
                pictures.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(pictures / f"{ability}-{index}-{number}.png")


def show_heldout(ability: str, count: int, tokens: int | None) -> None:
    """Print held-out prompts and what is expected."""
    for item in heldout(ability, count, tokens=tokens):
        print(f"--- held-out {ability} {item.index}\n{item.prompt}")
        print(f"expected: {item.expected}")


def stats(phase: str, batches: int, workers: int) -> None:
    """Print tokens and learned tokens an ability, padding, and the rate of making them."""
    tokens: Counter[str] = Counter()
    shapes: Counter[str] = Counter()
    total = padding = images = 0
    learned = 0.0
    began = time.perf_counter()
    for batch in stream(plan(phase), stop=batches, workers=workers):
        tokens.update(batch.tokens)
        shapes["x".join(map(str, batch.ids_BT.shape))] += 1
        total += batch.ids_BT.size
        padding += int(np.sum(batch.segment_BT < 0))
        learned += float(np.sum(batch.weight_BT == 1.0))
        images += len(batch.images)
    seconds = time.perf_counter() - began
    for ability, count in tokens.most_common():
        print(f"{ability:12} {count:10,} {count / total:6.1%}")
    print(f"padding {padding / total:.2%} · learned {learned / total:.1%} · {images:,} images")
    print(f"shapes {dict(shapes)} · {total:,} tokens in {seconds:.1f} s: {total / seconds:,.0f}/s")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ability", nargs="?", choices=[*ABILITIES, "all"], default="all")
    parser.add_argument("-n", type=int, default=2, help="samples to print")
    parser.add_argument("--room", type=int, default=700, help="largest sample, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heldout", action="store_true", help="held-out prompts instead")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures of the samples")
    parser.add_argument("--stats", metavar="PHASE", help="count the tokens of start, main or long")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.stats:
        stats(arguments.stats, arguments.batches, arguments.workers)
        return
    chosen = list(ABILITIES) if arguments.ability == "all" else [arguments.ability]
    for ability in chosen:
        if arguments.heldout:
            show_heldout(ability, arguments.n, None)
        else:
            show(ability, arguments.n, arguments.room, arguments.seed, arguments.pictures)


if __name__ == "__main__":
    main()
