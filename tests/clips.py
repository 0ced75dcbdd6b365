"""Short videos for tests, made here: MP4, WebM, AVI and animations of flat colours."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Sequence

CODECS = {"mp4": "mpeg4", "webm": "libvpx", "matroska": "mpeg4", "avi": "mpeg4"}
UPRIGHT = (0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
QUARTER_TURN = (0, 0x10000, 0, 0xFFFF0000, 0, 0, 0, 0, 0x40000000)


def greys(count: int, width: int = 64, height: int = 48) -> list[Image.Image]:
    """Frame i is of brightness 8 + 8 i, so that a frame tells its number."""
    return [Image.new("RGB", (width, height), (8 + 8 * i,) * 3) for i in range(count)]


def number_of(pixels: Any) -> int:
    """Which of `greys` a patch or picture is."""
    return round((float(np.mean(pixels)) - 8) / 8)


def encoded(frames: Sequence[Image.Image], kind: str = "mp4", rate: int = 8) -> bytes:
    """A video file of one of CODECS' kinds."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(CODECS[kind], rate=rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return out.getvalue()


def animated(frames: Sequence[Image.Image], kind: str = "GIF", frame_ms: int = 100) -> bytes:
    """An animation that Pillow writes."""
    out = io.BytesIO()
    more = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=frame_ms, **more)
    return out.getvalue()


def turned(mp4: bytes) -> bytes:
    """The file with a track header that asks for a quarter turn clockwise."""
    upright, quarter = (
        b"".join(value.to_bytes(4, "big") for value in matrix) for matrix in (UPRIGHT, QUARTER_TURN)
    )
    place = mp4.index(upright, mp4.index(b"tkhd"))
    return mp4[:place] + quarter + mp4[place + len(quarter) :]
