"""Encoded images to patches in the order the vision tower reads them (model.md D.1). No torch.

Patches stay bytes until the tower asks for some of them: a prompt of many large images holds three
bytes a pixel, not twenty-four.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from civetta.chat.image_rules import BadImage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from civetta.chat.image_rules import ImageRules

MAX_DECODED_PIXELS = 1 << 25
"""Pixels of an image as it comes; more is refused before anything is decoded."""

MAX_ENCODED_BYTES = 20 << 20
"""Bytes of one encoded image."""

MAX_SCANS = 100
"""Scans of one JPEG; programs write ten or so. Each costs a pass over the whole picture, however few
bytes it has."""

MAX_RUN_LENGTH_PIXELS = 1 << 20
MAX_RUN_LENGTH_BYTES = 1 << 21
"""Of a BMP in run-length form: Pillow reads those in Python, during which nobody else runs."""

FORMATS = "PNG, JPEG, WebP, GIF and BMP"

# Decoders of foreign bytes raise whatever their parsers happen to meet.
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
    AssertionError,
    EOFError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
)
BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_MODES_16_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")
_RUN_LENGTH = (1, 2)  # of 8 and of 4 bits a pixel
# A JPEG's next marker but those without a length that stand among the data of a scan.
_MARKER = re.compile(rb"\xff+([\x02-\xcf\xd8-\xfe])")
_EOI, _SOI, _SOS = 0xD9, 0xD8, 0xDA
_KNOWN = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MAGIC = (
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (8, b"WEBP", "WEBP"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypheic", "HEIC"),
    (4, b"ftypheix", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (0, b"%PDF", "PDF"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "SVG or XML"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"8BPS", "PSD"),
    (0, b"\xff\x0a", "JPEG XL"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedImage:
    """One image (or two frames of a video) resized and cut into patches.

    patches_PV: uint8 [grid_h * grid_w, channels * frames * patch * patch]; patches come block by
    block of merge x merge, row by row within a block and among the blocks; a patch is channel,
    frame, row, column. digest identifies what the tower sees.
    """

    rules: ImageRules
    grid_h: int
    grid_w: int
    frames: int
    patches_PV: NDArray[np.uint8]
    digest: bytes

    @property
    def rows(self) -> int:
        """Rows of tokens."""
        return self.grid_h // self.rules.merge

    @property
    def cols(self) -> int:
        """Columns of tokens."""
        return self.grid_w // self.rules.merge

    @property
    def tokens(self) -> int:
        """Tokens that stand for the image in a prompt."""
        return self.rows * self.cols

    def normalised(self, start: int, stop: int) -> NDArray[np.float32]:
        """Patches [start, stop) as the tower takes them: float32 [n, 3 * temporal * patch**2]."""
        rules = self.rules
        area = rules.patch**2
        part = self.patches_PV[start:stop].reshape(-1, 3, self.frames, area).astype(np.float32)
        mean, std = (
            np.array(values, np.float32)[:, None, None] for values in (rules.mean, rules.std)
        )
        part = (part * np.float32(1 / 255) - mean) / std
        part = np.repeat(part, rules.temporal // self.frames, axis=2)
        return part.reshape(len(part), -1)


def prepare_image(data: bytes, rules: ImageRules, *, declared: str | None = None) -> PreparedImage:
    """Decode, turn upright, flatten on white, resize and cut an encoded image.

    `declared` is the format its sender names, as in `_KNOWN`. Raises BadImage.
    """
    rgb = decode_image(data, declared=declared)
    height, width = rules.resized(rgb.height, rgb.width)
    return cut_patches([_resized(rgb, height, width)], rules)


def decode_image(data: bytes, *, declared: str | None = None) -> Image.Image:
    """The upright RGB picture that `data` encodes, its first frame if it has several.

    Raises BadImage for unknown, truncated, broken or oversized data.
    """
    kind = _sniffed(data, declared)
    if kind == "JPEG" and has_many_scans(data):
        raise BadImage(f"it has more than {MAX_SCANS} scans")
    try:
        with Image.open(io.BytesIO(data), formats=(kind,)) as image:
            _check_size(*image.size)
            if image.format == "BMP" and image.info.get("compression") in _RUN_LENGTH:
                _check_run_length(image, len(data))
            image.load()
            _check_size(*image.size)
            return _upright(flattened(image), _orientation(image))
    except BOMBS as error:  # its own limit is above ours and is met while it opens a file
        raise BadImage(f"it has more than {MAX_DECODED_PIXELS} pixels") from error
    except DECODE_ERRORS as error:
        raise BadImage(f"its {kind} data is damaged or incomplete ({_short(error)})") from error


def cut_patches(frames: Sequence[Image.Image], rules: ImageRules) -> PreparedImage:
    """Patches of RGB frames of one size that fits `rules`; 1 or `rules.temporal` frames."""
    pixels_FHWC = np.stack([np.asarray(frame, np.uint8) for frame in frames])
    count, height, width, channels = pixels_FHWC.shape
    patch, merge = rules.patch, rules.merge
    assert channels == 3, "frames are RGB"
    assert count in (1, rules.temporal), "a patch spans one still or all its frames"
    grid_h, grid_w = height // patch, width // patch
    blocks = pixels_FHWC.reshape(
        count, grid_h // merge, merge, patch, grid_w // merge, merge, patch, channels
    )
    patches_PV = blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(grid_h * grid_w, -1)
    patches_PV = np.ascontiguousarray(patches_PV)
    head = f"civetta-image-1 {grid_h} {grid_w} {count} {patch} {merge} {rules.temporal}"
    digest = hashlib.blake2b(f"{head} {rules.mean} {rules.std}".encode(), digest_size=16)
    digest.update(patches_PV.data)
    return PreparedImage(
        rules=rules,
        grid_h=grid_h,
        grid_w=grid_w,
        frames=count,
        patches_PV=patches_PV,
        digest=digest.digest(),
    )


def _sniffed(data: bytes, declared: str | None) -> str:
    if not data:
        raise BadImage("it is empty")
    if len(data) > MAX_ENCODED_BYTES:
        raise BadImage(f"it has {len(data)} bytes, and {MAX_ENCODED_BYTES} are the limit")
    found = next((kind for at, magic, kind in _MAGIC if data[at : at + len(magic)] == magic), None)
    if found is None:
        raise BadImage(f"its bytes are in no known image format; {FORMATS} are read")
    if found not in _KNOWN:
        raise BadImage(f"it is {found}; {FORMATS} are read")
    if declared is not None and declared != found:
        raise BadImage(f"it is declared as {declared} but its bytes are {found}")
    return found


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise BadImage("it has no pixels")
    if width * height > MAX_DECODED_PIXELS:
        raise BadImage(
            f"it has {width} x {height} pixels, and {MAX_DECODED_PIXELS} in all are the limit"
        )


def has_many_scans(data: bytes) -> bool:
    """Whether a JPEG has more than MAX_SCANS up to its end; what lies within segments is none."""
    at, scans = 0, 0
    while found := _MARKER.search(data, at):
        marker, at = found[1][0], found.end()
        if marker == _EOI:
            return False
        scans += marker == _SOS
        if scans > MAX_SCANS:
            return True
        if marker != _SOI:
            at += int.from_bytes(data[at : at + 2])
    return False


def _check_run_length(image: Image.Image, size: int) -> None:
    if image.width * image.height > MAX_RUN_LENGTH_PIXELS or size > MAX_RUN_LENGTH_BYTES:
        raise BadImage(
            f"it is a run-length BMP of {image.width} x {image.height} pixels and {size} bytes, and"
            f" {MAX_RUN_LENGTH_PIXELS} pixels and {MAX_RUN_LENGTH_BYTES} bytes are the limit of"
            " those; send it as PNG"
        )


def flattened(image: Image.Image) -> Image.Image:
    """RGB; transparent pixels show white behind them."""
    if image.mode in _MODES_16_BIT:
        return _from_16_bit(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(white, rgba).convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, scaled and not cut: 65535 is white."""
    grey = np.asarray(image).astype(np.int64).clip(0, 65535)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey = np.where(grey == clear, 65535, grey)
    return Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8), "L").convert("RGB")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8; upright when the EXIF data is broken, as browsers have it."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except DECODE_ERRORS:
        return 1
    return value if isinstance(value, int) else 1


def _upright(rgb: Image.Image, orientation: int) -> Image.Image:
    turn = _UPRIGHT.get(orientation)
    return rgb if turn is None else rgb.transpose(turn)


def _resized(rgb: Image.Image, height: int, width: int) -> Image.Image:
    if rgb.size == (width, height):
        return rgb
    return rgb.resize((width, height), Image.Resampling.BICUBIC)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:80].rstrip(".") or type(error).__name__
