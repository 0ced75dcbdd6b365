"""Which model a stored state belongs to: states of one are noise to another.

Hashing a hundred gigabytes at every start would take minutes. Instead each file counts with its
name, size, time of change and samples spread over it, together with everything else that bits
depend on: configuration, precision, device, the kernels' names, versions.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from civetta.cache.keys import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SAMPLES = 256
SAMPLE_BYTES = 4096


def model_fingerprint(files: Sequence[Path], facts: Mapping[str, object]) -> str:
    """BLAKE2b of the model's files and of `facts`, hexadecimal. Raises OSError."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(facts):
        digest.update(f"{name}={facts[name]!r}\n".encode())
    for path in files:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            last = max(stat.st_size - SAMPLE_BYTES, 0)
            for i in range(SAMPLES):
                file.seek(last * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
