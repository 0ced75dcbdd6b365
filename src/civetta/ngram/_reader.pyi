"""The compiled reader of table rows (sources in `native/`): jobs of pieces, read as whole pages.

Addresses are plain integers; the caller keeps the arrays alive during `submit` and has checked
them. A job owns the memory that its pieces are copied to, also while reads go on after `cancel`.
Threads never take the GIL. After a fork nothing opened before may be used in the child; objects
may be dropped there.
"""

class Job:
    """A gather on its way."""

    @property
    def state(self) -> str:
        """One of running, done, failed, cancelled."""

    @property
    def left(self) -> int:
        """Extents that are not done."""

    @property
    def extents(self) -> int:
        """Reads that the pieces were merged into."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def failure(self) -> tuple[int, int, int]:
        """Errno (-1 end of file, -2 reader ended), file, offset in bytes."""

    def wait(self, timeout_ms: int) -> bool:
        """Whether the job was over in time; releases the GIL."""

    def cancel(self) -> None: ...

class Reader:
    """A ring or a pool over open files."""

    def submit(
        self, files: int, offsets: int, sizes: int, outs: int, count: int, out_bytes: int, /
    ) -> Job:
        """Read `count` pieces, sorted by file and offset.

        Arrays: files int32, offsets int64 (bytes in the file), sizes int32 (bytes), outs int64
        (bytes in the job's memory).
        """

    def inject(
        self,
        error: int,
        short_bytes: int,
        delay_us: int,
        die: bool,
        after: int,
        count: int,
        /,
    ) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

def open_reader(kind: str, files: list[int], depth: int, largest: int, /) -> Reader:
    """A "uring" or "pool" reader; `largest` is the size of the largest piece in bytes."""

def uring_allowed() -> bool: ...
def jobs_alive() -> int: ...
