"""`ImageWork`: the images of prompts on their way through the vision tower.

One image at a time, one step of bounded work at a time (model/vision.py), between other requests'
tokens. A job keeps the rows of images that its next chunk needs and drops them behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.cache.protocol import ImageMark
from civetta.engine.image_rows import ImageRowsCache
from civetta.model.inputs import ImageRows
from civetta.state.spans import ImageSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from civetta.engine.job import Job
    from civetta.engine.language_model import Encoding, LanguageModel


class ImageWork:
    """Encodes what prompts need; used by the step thread alone."""

    def __init__(self, model: LanguageModel, *, cache_bytes: int) -> None:
        self._model = model
        self._cache = ImageRowsCache(cache_bytes)
        self._under_way: tuple[Job, int, Encoding] | None = None

    def mark(self, job: Job) -> None:
        """Note where the job's images lie, with the digests that tell states apart."""
        job.spans = tuple(
            ImageSpan(
                start=item.position,
                rows=item.image.rows,
                cols=item.image.cols,
                digest=self._model.image_digest(item.image),
            )
            for item in job.request.spec.images
        )
        job.images = tuple(ImageMark(position=span.start, digest=span.digest) for span in job.spans)

    def lacks(self, job: Job, n_tokens: int) -> bool:
        """Whether an image has to be encoded before the job's next tokens can be computed."""
        return any(True for _ in self._missing(job, n_tokens))

    def next_owner(self, job: Job) -> Job:
        """Whose image the next step belongs to: one under way comes first."""
        self.sweep()
        return job if self._under_way is None else self._under_way[0]

    def sweep(self) -> None:
        """Forget an encoding whose request has ended or waits again."""
        if self._under_way is not None and (
            self._under_way[0].session is None or self._under_way[0].request.state.terminal
        ):
            self._under_way = None

    def advance(self, job: Job, n_tokens: int) -> None:
        """Do one step of the job's image under way, or of the first that its tokens lack."""
        if self._under_way is None:
            index = next(self._missing(job, n_tokens), None)
            if index is None:
                return
            encoding = self._model.begin_image(job.request.spec.images[index].image)
        else:
            owner, index, encoding = self._under_way
            assert owner is job, "the image under way belongs to another job"
        self._under_way = None  # a step that raises ends the encoding
        if not encoding.advance():
            self._under_way = (job, index, encoding)
            return
        job.image_rows[index] = encoding.rows_NW
        self._cache.put(job.spans[index].digest, encoding.rows_NW)

    def rows(self, job: Job, n_tokens: int) -> list[ImageRows]:
        """Rows of the images that the job's next tokens reach into; all are encoded."""
        return [
            ImageRows(start=job.spans[index].start, rows_ND=job.image_rows[index])
            for index in self._touched(job, n_tokens)
        ]

    def release(self, job: Job) -> None:
        """Drop the rows of images that the job has behind it."""
        done = job.live.position
        for index, span in enumerate(job.spans):
            if span.stop <= done:
                job.image_rows.pop(index, None)

    def check(self) -> None:
        """Prove that the books balance."""
        self._cache.check()

    def _touched(self, job: Job, n_tokens: int) -> Iterator[int]:
        first = job.request.prefilled_tokens
        for index, span in enumerate(job.spans):
            if span.start < first + n_tokens and span.stop > first:
                yield index

    def _missing(self, job: Job, n_tokens: int) -> Iterator[int]:
        for index in self._touched(job, n_tokens):
            if index not in job.image_rows:
                known = self._cache.get(job.spans[index].digest)
                if known is None:
                    yield index
                else:
                    job.image_rows[index] = known
