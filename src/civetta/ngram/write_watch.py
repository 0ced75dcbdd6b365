"""`WriteWatch`: which of some open files were written to, as the kernel tells it.

A new time of change alone says little: `touch`, a backup or a copy of attributes set it as well.
inotify tells writes and truncations apart from those, on the machine that makes them; it does not
see writes through a memory mapping, nor those of another machine on a network file system, so
whoever asks looks at the bytes besides. Linux only; elsewhere, and where the system has no watch
left, `tells` is False.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODIFY, _OVERFLOW = 0x2, 0x4000  # <sys/inotify.h>
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name behind it


class WriteWatch:
    """Watches files from now on. For one thread at a time; a forked child cannot ask it."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._pid = os.getpid()
        self._written: set[int] = set()
        self._numbers: dict[int, list[int]] = {}  # by the kernel's watch: one file may come twice
        self._handle = -1
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            return
        self._handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for number, fd in enumerate(fds if self._handle >= 0 else ()):
            watch = libc.inotify_add_watch(self._handle, b"/proc/self/fd/%d" % fd, _MODIFY)
            if watch < 0:
                self.close()
                return
            self._numbers.setdefault(watch, []).append(number)

    @property
    def tells(self) -> bool:
        """Whether `written` means anything."""
        return self._handle >= 0 and self._pid == os.getpid()

    def written(self) -> set[int]:
        """Numbers of the files that were written to since the start, in the order of `fds`."""
        while self.tells:
            try:
                events = os.read(self._handle, 4096)
            except BlockingIOError:
                break
            at = 0
            while at < len(events):
                watch, mask, _, name_bytes = _EVENT.unpack_from(events, at)
                at += _EVENT.size + name_bytes
                if mask & _OVERFLOW:  # events were lost
                    self._written.update(*self._numbers.values())
                elif mask & _MODIFY:
                    self._written.update(self._numbers[watch])
        return self._written

    def close(self) -> None:
        """Give the handle back; idempotent."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
