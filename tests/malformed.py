"""Images that cannot be used, by what is wrong with them, and words of the reason that is given."""

from __future__ import annotations

import struct
import zlib

import pictures


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width, height, bits, colour, raw: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG chunk by chunk; `raw` holds the rows without filter bytes."""
    step = len(raw) // height if height else 0
    rows = b"".join(b"\0" + raw[i * step : (i + 1) * step] for i in range(min(height, 64)))
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", head), *(chunk(*item) for item in extra)]
    parts += [chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def many_scans(more: int) -> bytes:
    """A progressive JPEG whose last scan, of few bytes, comes `more` times again."""
    data = pictures.encoded(pictures.flat(64, 48, "red"), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * more + data[-2:]


def run_length_bmp(width: int, height: int, runs: bytes) -> bytes:
    """A BMP of 8 bits a pixel, grey, whose pixels are `runs`."""
    palette = b"".join(bytes([i, i, i, 0]) for i in range(256))
    start = 14 + 40 + len(palette)
    head = struct.pack("<IHHI", start + len(runs), 0, 0, start)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + head + info + palette + runs


PNG = pictures.encoded(pictures.noise(64, 48))
JPEG = pictures.encoded(pictures.noise(64, 48), "JPEG")
WEBP = pictures.encoded(pictures.noise(64, 48), "WEBP")
GIF = pictures.encoded(pictures.noise(64, 48), "GIF")
BMP = pictures.encoded(pictures.noise(64, 48), "BMP")

MALFORMED = {
    "empty": (b"", "empty"),
    "text": (b"hello there", "no known image format"),
    "html": (b"<html><body>404</body></html>", "no known image format"),
    "svg": (b"<svg xmlns='x'/>", "it is SVG"),
    "pdf": (b"%PDF-1.7", "it is PDF"),
    "tiff": (pictures.encoded(pictures.noise(8, 8), "TIFF"), "it is TIFF"),
    "avif": (b"\0\0\0\x20ftypavif" + b"\0" * 40, "it is AVIF"),
    "heic": (b"\0\0\0\x20ftypheic" + b"\0" * 40, "it is HEIC"),
    "png head only": (PNG[:8], "damaged or incomplete"),
    "png cut": (PNG[: len(PNG) // 2], "damaged or incomplete"),
    "png bad crc": (PNG[:50] + bytes([PNG[50] ^ 255]) + PNG[51:], "damaged or incomplete"),
    "jpeg cut": (JPEG[: len(JPEG) // 2], "damaged or incomplete"),
    "jpeg head only": (JPEG[:4], "damaged or incomplete"),
    "webp cut": (WEBP[: len(WEBP) // 2], "damaged or incomplete"),
    "gif cut": (GIF[: len(GIF) // 2], "damaged or incomplete"),
    "bmp cut": (BMP[: len(BMP) // 2], "damaged or incomplete"),
    "no width": (png_of(0, 5, 8, 2, b""), "damaged|no pixels"),
    "bomb by header": (png_of(30000, 30000, 8, 2, b"\0" * 64), "pixels"),
    "huge bomb": (png_of(2**31 - 1, 2**31 - 1, 8, 2, b"\0" * 64), "pixels"),
    "gif bomb": (b"GIF89a\xff\xff\xff\xff\0\0\0," + b"\0\0\0\0\xff\xff\xff\xff\0\x02\0", "pixels"),
    "bmp bomb": (BMP[:18] + struct.pack("<ii", 60000, 60000) + BMP[26:], "pixels"),
    "bmp negative": (BMP[:18] + struct.pack("<ii", -5, -5) + BMP[26:], "pixels"),
    "jpeg of many scans": (many_scans(100), "more than 100 scans"),
    "run-length bomb": (run_length_bmp(1 << 20, 2, b"\1\1\0\0"), "run-length BMP .* as PNG"),
    "run-length noise": (
        run_length_bmp(8, 8, b"\1\1" * (1 << 20)),
        "run-length BMP .* 2097152 bytes are the limit",
    ),
    "text chunk bomb": (
        png_of(8, 8, 8, 0, b"\0" * 64, (b"zTXt", b"k\0\0" + zlib.compress(b"x" * 50_000_000))),
        "damaged or incomplete",
    ),
    "strip": (pictures.encoded(pictures.flat(2010, 10, "red")), "one side may be 200 times"),
    "too many bytes": (PNG + b"\0" * (21 << 20), "20971520 are the limit"),
}
