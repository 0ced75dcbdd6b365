"""kill -9 while states are written: a program, and what test_kill.py runs a few rounds of.

    python tests/cache/kill_writes.py --kills 200

Each round a child process holds conversations over one cache folder and is killed: every second
time by a timer, else by itself before, in the middle of or after a file operation. The next round
opens what it left: every state that is offered passes its checksum and answers as a cold session.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from cache.worlds import World, cold
from civetta.cache.disk_files import Files
from civetta.cache.survey import survey, verify
from civetta.kernels.select import REFERENCE
from civetta.model.build import load_trunk
from civetta.model.tiny import write_tiny

DISK_BYTES = 3_000_000  # room for a few states: each round removes some as well
TALKS = 6


class DyingFiles(Files):
    """Kills its process at the n-th operation, in a way that depends on n."""

    def __init__(self, fatal):
        self.left = fatal

    def _step(self):
        self.left -= 1
        return self.left == 0

    def write(self, path, chunks):
        data = b"".join(bytes(chunk) for chunk in chunks)
        if self._step():
            path.write_bytes(data[: len(data) * (os.getpid() % 5) // 4])
            _die()
        return super().write(path, [data])

    def rename(self, source, target):
        self._around(lambda: super(DyingFiles, self).rename(source, target))

    def sync_folder(self, folder):
        self._around(lambda: super(DyingFiles, self).sync_folder(folder))

    def remove(self, path):
        self._around(lambda: super(DyingFiles, self).remove(path))

    def _around(self, action):
        fatal = self._step()
        if fatal and os.getpid() % 2:
            _die()
        action()
        if fatal:
            _die()


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def talk_of(number, turns):
    """The tokens of a conversation after some turns; the same in every process."""
    chosen = random.Random(number)
    shared = [chosen.randrange(255) for _ in range(90)] if number % 2 else [7] * 90
    return [*shared, *(chosen.randrange(255) for _ in range(40 * turns))]


def converse(trunk, folder, seed, fatal):
    """The child: conversations until it dies."""
    chosen = random.Random(seed)
    files = DyingFiles(fatal) if fatal else None
    world = World(trunk, folder=folder, files=files, disk_bytes=DISK_BYTES)
    while True:
        talk = talk_of(chosen.randrange(TALKS), chosen.randrange(1, 8))
        world.turn(talk, [1, 2])
        world.clock.now_s += 400


def inspect(trunk, folder, seed):
    """The next start: how many states were offered, and how many bytes of them were wrong."""
    if not (folder / "civetta-cache" / "entries").exists():
        return 0
    damaged = [problem for item, problem in verify(folder) if problem is not None]
    assert not damaged, damaged
    offered = len(survey(folder))
    world = World(trunk, folder=folder, disk_bytes=DISK_BYTES)
    assert world.cache.stats().entries_disk == offered
    assert world.cache.stats().disk_bytes <= DISK_BYTES
    chosen = random.Random(seed)
    for number in chosen.sample(range(TALKS), 2):
        talk = talk_of(number, chosen.randrange(1, 8))
        rows, _ = world.turn(talk, [3, 4])
        assert torch.equal(rows, cold(trunk, talk, [3, 4])), "a reply is not the cold one"
    assert world.cache.stats().damaged_total == 0
    world.close()
    return offered


def run(kills, *, seed=0, log=lambda _: None):
    """Rounds of killing and looking; states that were there to look at, over all rounds."""
    torch.set_num_threads(1)  # children are forked: no pool of threads may be alive
    root = Path(tempfile.mkdtemp())
    trunk = load_trunk(write_tiny(root / "model"), ops=REFERENCE)
    folder, chosen, seen = root / "cache", random.Random(seed), 0
    context = multiprocessing.get_context("fork")
    try:
        for number in range(kills):
            fatal = 0 if number % 2 else chosen.randrange(1, 40)
            child = context.Process(target=converse, args=(trunk, folder, number, fatal))
            child.start()
            if fatal:
                child.join(60)
            else:
                time.sleep(chosen.uniform(0.0, 0.8))
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL, f"the child ended by itself: {child.exitcode}"
            offered = inspect(trunk, folder, number)
            seen += offered
            log(f"kill {number + 1}: {offered} states, all whole, replies equal")
    finally:
        shutil.rmtree(root)
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    seen = run(arguments.kills, seed=arguments.seed, log=lambda line: print(line, flush=True))  # noqa: T201
    print(  # noqa: T201
        f"{arguments.kills} kills, {seen} states looked at, none damaged, all replies equal;"
        f" {time.monotonic() - began_s:.0f} s"
    )


if __name__ == "__main__":
    main()
