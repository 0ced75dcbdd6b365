"""`civetta probe`: teacher-forced logits of given tokens, as bytes and as a hash.

The prompt is prefilled in chunks of --batch tokens, then the decode tokens are fed one by one. Rows
of float32 logits go to --dump, little-endian [rows, vocab]; the hash is over the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from civetta.cli.inputs import read_text
from civetta.cli.interrupts import interrupts_deferred
from civetta.cli.loading_bar import LoadingBar
from civetta.cli.options import settings_command
from civetta.errors import ContextOverflow, OutputFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from civetta.chat.tokenizer import Tokenizer
    from civetta.model.trunk import Trunk
    from civetta.options import Settings


@click.command(short_help="Write teacher-forced logits of a text.")
@click.option("--prompt-file", metavar="TEXT", help="Text file of the prompt, used as it is.")
@click.option("--tokens", metavar="FILE", help="File of prompt token ids, separated by spaces.")
@click.option("--decode-file", metavar="TEXT", help="Text that is then fed token by token.")
@click.option("--decode-tokens", metavar="FILE", help="Token ids that are then fed one by one.")
@click.option("--batch", metavar="N", type=int, default=2048, help="Prompt tokens a chunk [2048].")
@click.option("--all-logits", is_flag=True, help="Rows of all prompt tokens, not the last alone.")
@click.option("--dump", metavar="OUT", help="File for the logits, float32 little-endian.")
@settings_command("model")
def probe(
    settings: Settings,
    *,
    prompt_file: str | None,
    tokens: str | None,
    decode_file: str | None,
    decode_tokens: str | None,
    batch: int,
    all_logits: bool,
    dump: str | None,
) -> int:
    """Print one JSON object: rows, vocab, tokens, sha256, prefill_s, decode_s."""
    if (prompt_file is None) == (tokens is None):
        raise UsageError("give the prompt either as --prompt-file TEXT or as --tokens FILE.")
    if decode_file is not None and decode_tokens is not None:
        raise UsageError("give either --decode-file or --decode-tokens, not both.")
    if not 1 <= batch <= 1 << 20:
        raise UsageError(f"--batch must be from 1 to 1048576, not {batch}.")
    with interrupts_deferred():
        from civetta.engine.load import load_trunk_only

    with LoadingBar() as bar:
        loaded = load_trunk_only(settings, progress=bar)
    vocab = loaded.trunk.config.vocab
    prompt = _ids(prompt_file, tokens, loaded.tokenizer, vocab)
    if not prompt:
        raise UsageError("the prompt has no tokens; give at least one.")
    decode = _ids(decode_file, decode_tokens, loaded.tokenizer, vocab)
    if len(prompt) + len(decode) > loaded.context_tokens:
        raise ContextOverflow(len(prompt), loaded.context_tokens, len(decode))
    out: AbstractContextManager[BinaryIO | None] = (
        nullcontext() if dump is None else _open(Path(dump))
    )
    run = _Run(loaded.trunk, len(prompt) + len(decode))
    try:
        with out as file:
            run.begin(file)
            run.prefill(prompt, batch, all_logits=all_logits)
            run.decode(decode)
    except OSError as error:
        if dump is None or error.filename is not None:  # of another file
            raise
        raise OutputFailed.at(dump, error) from error
    click.echo(json.dumps(run.report(len(prompt) + len(decode))))
    return 0


class _Run:
    """One sequence through the trunk; rows are hashed and written as they come."""

    def __init__(self, trunk: Trunk, tokens: int) -> None:
        self._trunk = trunk
        self._file: BinaryIO | None = None
        self._session = trunk.store(sessions=1, context_tokens=tokens).open()
        self._hash = hashlib.sha256()
        self._rows = 0
        self._prefill_s = self._decode_s = 0.0

    def begin(self, file: BinaryIO | None) -> None:
        """Where rows are written from now on; None writes none."""
        self._file = file

    def prefill(self, ids: list[int], batch: int, *, all_logits: bool) -> None:
        """Chunks of `batch` tokens; only the last row unless all are wanted."""
        started = time.perf_counter()
        for start in range(0, len(ids), batch):
            last = start + batch >= len(ids)
            rows = "all" if all_logits else "last" if last else "none"
            self._take(
                self._trunk.forward(
                    self._session,
                    ids[start : start + batch],
                    rows,  # type: ignore[arg-type]  # a literal by construction
                    next_ids=ids[start + batch : start + 2 * batch],
                )
            )
        self._prefill_s = time.perf_counter() - started

    def decode(self, ids: list[int]) -> None:
        """One row a token."""
        started = time.perf_counter()
        for n, token in enumerate(ids):
            self._take(
                self._trunk.forward(self._session, [token], "last", next_ids=ids[n + 1 : n + 2])
            )
        self._decode_s = time.perf_counter() - started

    def report(self, tokens: int) -> dict[str, object]:
        """What is printed."""
        return {
            "rows": self._rows,
            "vocab": self._trunk.config.vocab,
            "tokens": tokens,
            "sha256": self._hash.hexdigest(),
            "prefill_s": round(self._prefill_s, 6),
            "decode_s": round(self._decode_s, 6),
        }

    def _take(self, logits: Tensor) -> None:
        for row in _row_bytes(logits):
            self._hash.update(row)
            if self._file is not None:
                self._file.write(row)
            self._rows += 1


def _row_bytes(logits: Tensor) -> Iterator[bytes]:
    for row in logits.cpu().numpy().astype("<f4", copy=False):
        yield row.tobytes()


def _ids(
    text_file: str | None, token_file: str | None, tokenizer: Tokenizer | None, vocab: int
) -> list[int]:
    if token_file is not None:
        return _read_ids(Path(token_file), vocab)
    if text_file is None:
        return []
    if tokenizer is None:
        raise UsageError("this model has no tokenizer; give token ids in a file.")
    ids = tokenizer.encode(_read(Path(text_file)))
    return [int(i) for i in ids]


def _read_ids(path: Path, vocab: int) -> list[int]:
    ids = []
    for number, word in enumerate(_read(path).split(), 1):
        if not word.isascii() or not word.isdigit() or len(word) > 12 or int(word) >= vocab:
            raise UsageError(
                f"{path}: entry {number} is {word[:40]!r}, but must be a token id from 0 to"
                f" {vocab - 1}."
            )
        ids.append(int(word))
    return ids


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return read_text(file, str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
