"""What makes two prefixes the same: token ids, and the images between them. No torch.

Symbols are what the index compares: a token's id, or at an image's first token a negative number
made from its digest. Page keys are hashes that chain from page to page, so that one of them stands
for everything before its end; the disk tier knows full pages by them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from civetta.cache.protocol import ImageMark

DIGEST_BYTES = 32


def symbols(
    tokens: Sequence[int] | NDArray[np.int32], images: Sequence[ImageMark] = ()
) -> NDArray[np.int64]:
    """One int64 a token. Images beyond the tokens are left out."""
    found = np.array(tokens, dtype=np.int64)
    for image in images:
        if image.position < len(found):
            found[image.position] = -1 - int.from_bytes(image.digest[:7], "big")
    return found


def seen_images(images: Sequence[ImageMark], tokens: int) -> tuple[ImageMark, ...]:
    """The images that the first `tokens` tokens have begun."""
    return tuple(image for image in images if image.position < tokens)


def page_keys(
    tokens: NDArray[np.int32], images: Sequence[ImageMark], page_tokens: int, seed: bytes
) -> list[bytes]:
    """One chained key a full page; `seed` names model, dtype and format."""
    keys, key = [], seed
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        stop = start + page_tokens
        digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES)
        digest.update(np.ascontiguousarray(tokens[start:stop], dtype="<i4").tobytes())
        for image in images:
            if start <= image.position < stop:
                digest.update(b"%d:%b" % (image.position, image.digest))
        key = digest.digest()
        keys.append(key)
    return keys


def state_key(tokens: NDArray[np.int32], images: Sequence[ImageMark], seed: bytes) -> bytes:
    """Names a state: the hash of everything that it depends on."""
    digest = hashlib.blake2b(seed, digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    for image in seen_images(images, len(tokens)):
        digest.update(b"%d:%b" % (image.position, image.digest))
    return digest.digest()


def common_symbols(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """How many symbols two arrays share from the start."""
    count = min(len(first), len(second))
    differs = first[:count] != second[:count]
    return int(differs.argmax()) if differs.any() else count


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    # Halving with slices compares at C speed; token by token would be slow for long prompts.
    while low + 1 < high:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
