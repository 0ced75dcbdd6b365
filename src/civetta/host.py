"""What the machine has left."""

from __future__ import annotations

from pathlib import Path

_UNTOLD_BYTES = 1 << 40


def available_host_bytes(root: Path = Path("/")) -> int:
    """Memory that a new process could take: the machine's, or its control group's (v2) if less.

    `root` holds proc/ and sys/. What the kernel does not tell counts as 1 TiB: nothing is refused
    for want of a number.
    """
    free = _UNTOLD_BYTES
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = int(value.split()[0]) * 1024
    group = root / "sys/fs/cgroup"
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(int(limit) - int(used), 0))
    return free


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
