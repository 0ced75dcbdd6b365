"""Damages images at random and reads them; run as a program, so that its memory is its own.

    python tests/image_fuzz.py [COUNT [SEED]]

Prints JSON: images read and refused, the longest reason, and by how much the peak of memory grew.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import warnings
from collections import Counter

from PIL import Image

import pictures
from civetta.chat.image_rules import BadImage, ImageRules
from civetta.chat.images import prepare_image
from malformed import BMP, GIF, JPEG, PNG, WEBP

RULES = ImageRules(patch=16, merge=2, temporal=2).limited(4, 16)
BASES = (
    PNG,
    JPEG,
    WEBP,
    GIF,
    BMP,
    pictures.encoded(Image.new("RGBA", (40, 40), (9, 9, 9, 9))),
    pictures.encoded(pictures.noise(30, 30).convert("P"), "PNG"),
    pictures.encoded(pictures.noise(33, 31), "JPEG", progressive=True),
)


def damaged(draw: random.Random, number: int) -> bytes:
    """One of the bases with some bytes changed, now and then cut short."""
    data = bytearray(BASES[number % len(BASES)])
    for _ in range(draw.choice((1, 2, 8, 40))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    if draw.random() < 0.2:
        del data[draw.randrange(len(data)) :]
    return bytes(data)


def fuzz(count: int = 1000, seed: int = 7) -> dict[str, int]:
    """What became of so many images; anything but BadImage is raised."""
    draw, found, longest = random.Random(seed), Counter(), 0
    prepare_image(PNG, RULES)  # what a first image brings in is no growth
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        try:
            image = prepare_image(damaged(draw, number), RULES)
        except BadImage as error:
            found["refused"] += 1
            longest = max(longest, len(str(error)))
        else:
            found["read"] += 1
            assert image.tokens <= 16
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {**found, "longest": longest, "grown_kib": grown_kib}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # decoders remark on what they skip
    sys.stdout.write(json.dumps(fuzz(*(int(text) for text in sys.argv[1:]))) + "\n")
