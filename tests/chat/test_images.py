"""Images from bytes to patches: the reference processor, every encoding, and the malformed corpus."""

from __future__ import annotations

import random
import resource
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import pictures
from civetta.chat.image_rules import BadImage, ImageRules
from civetta.chat.images import MAX_DECODED_PIXELS, decode_image, prepare_image
from civetta.errors import UsageError

RULES = ImageRules(patch=16, merge=2, temporal=2)


def reference(image: Image.Image, rules: ImageRules = RULES) -> tuple[np.ndarray, list[int]]:
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels},
    )
    out = processor(images=[image], return_tensors="np")
    return out["pixel_values"], out["image_grid_thw"][0].tolist()


@pytest.mark.parametrize(
    ("width", "height"),
    [(32, 32), (1, 1), (300, 200), (1024, 768), (777, 333), (50, 5000), (5, 900), (48, 80)],
)
@pytest.mark.parametrize("rules", [RULES, RULES.limited(4, 100)], ids=["file", "limited"])
def test_patches_equal_the_reference_processor(width, height, rules) -> None:
    picture = pictures.noise(width, height, 1)
    right, grid = reference(picture, rules)
    found = prepare_image(pictures.encoded(picture), rules)
    assert grid == [1, found.grid_h, found.grid_w]
    assert found.tokens == found.rows * found.cols == len(right) // 4
    np.testing.assert_allclose(found.normalised(0, len(right)), right, atol=1e-6)
    np.testing.assert_array_equal(found.normalised(4, 8), found.normalised(0, len(right))[4:8])


def test_limits_bound_the_tokens() -> None:
    data = pictures.encoded(pictures.noise(640, 480))
    assert prepare_image(data, RULES.limited(0, 100)).tokens <= 100
    assert prepare_image(data, RULES.limited(2000, 0)).tokens >= 2000
    with pytest.raises(UsageError, match="--image-min-tokens"):
        RULES.limited(200, 100)


def test_digests_follow_what_the_tower_sees() -> None:
    data = pictures.encoded(pictures.noise(64, 64, 1))
    first = prepare_image(data, RULES)
    assert prepare_image(data, RULES).digest == first.digest
    assert prepare_image(data, RULES.limited(100, 0)).digest != first.digest
    other = pictures.noise(64, 64, 1)
    other.putpixel((63, 63), (1, 2, 3))
    assert prepare_image(pictures.encoded(other), RULES).digest != first.digest
    again = pictures.encoded(pictures.noise(64, 64, 1), "BMP")
    assert prepare_image(again, RULES).digest == first.digest


# Encodings


def test_lossless_encodings_give_the_pixels_back() -> None:
    picture = pictures.noise(40, 30)
    for kind, more in (("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})):
        found = decode_image(pictures.encoded(picture, kind, **more))
        assert found.tobytes() == picture.tobytes(), kind


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_lossy_encodings_are_near(kind) -> None:
    picture = pictures.flat(40, 30, "teal")
    found = np.asarray(decode_image(pictures.encoded(picture, kind)), int)
    assert np.abs(found - np.asarray(picture, int)).max() <= 4


def test_only_the_first_frame_counts() -> None:
    frames = [pictures.flat(20, 20, colour) for colour in ("red", "blue")]
    for kind, more in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = pictures.encoded(frames[0], kind, save_all=True, append_images=frames[1:], **more)
        assert decode_image(data).getpixel((3, 3)) == (255, 0, 0), kind


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_turns_the_picture(orientation, kind) -> None:
    picture = Image.new("RGB", (32, 16), "black")
    picture.paste("white", (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decode_image(pictures.encoded(picture, kind, exif=exif))
    places = {
        1: (0, 0),
        2: (1, 0),
        3: (1, 1),
        4: (0, 1),
        5: (0, 0),
        6: (1, 0),
        7: (1, 1),
        8: (0, 1),
    }
    assert found.size == ((32, 16) if orientation < 5 else (16, 32))
    for x in (0, 1):
        for y in (0, 1):
            at = (found.width * (1 + 2 * x) // 4, found.height * (1 + 2 * y) // 4)
            assert (found.getpixel(at)[0] > 128) == ((x, y) == places[orientation])


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_leaves_the_picture_as_it_is() -> None:
    data = pictures.encoded(
        pictures.flat(9, 9, "red"), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"
    )
    assert decode_image(data).size == (9, 9)


def test_transparency_is_white() -> None:
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    clear.putpixel((1, 0), (255, 0, 0, 127))
    for kind, more in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        found = decode_image(pictures.encoded(clear, kind, **more))
        assert found.getpixel((5, 5)) == (255, 255, 255)
        assert found.getpixel((0, 0)) == (255, 0, 0)
        assert 126 <= found.getpixel((1, 0))[1] <= 129
    grey = Image.new("LA", (4, 4), (10, 0))
    assert decode_image(pictures.encoded(grey)).getpixel((1, 1)) == (255, 255, 255)
    palette = pictures.flat(4, 4, "red").convert("P")
    data = pictures.encoded(palette, "PNG", transparency=palette.getpixel((0, 0)))
    assert decode_image(data).getpixel((1, 1)) == (255, 255, 255)
    colour_key = pictures.encoded(pictures.flat(4, 4, "red"), "PNG", transparency=(255, 0, 0))
    assert decode_image(colour_key).getpixel((1, 1)) == (255, 255, 255)


def test_other_colour_models() -> None:
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red = decode_image(pictures.encoded(cmyk, "JPEG", quality=95)).getpixel((4, 4))
    assert red[0] > 200
    assert max(red[1:]) < 60
    assert decode_image(pictures.encoded(Image.new("1", (9, 9), 1))).getpixel((4, 4)) == (255,) * 3
    assert decode_image(pictures.encoded(Image.new("L", (9, 9), 77))).getpixel((4, 4)) == (77,) * 3
    palette = pictures.flat(9, 9, "navy").convert("P", palette=Image.Palette.ADAPTIVE)
    assert decode_image(pictures.encoded(palette)).getpixel((4, 4)) == (0, 0, 128)


def test_16_bit_grey_is_scaled() -> None:
    levels = np.array([[0, 255, 32768, 65535]], np.uint16)
    found = decode_image(pictures.encoded(Image.fromarray(levels)))
    assert [found.getpixel((x, 0)) for x in range(4)] == [(v,) * 3 for v in (0, 1, 128, 255)]
    keyed = png_of(4, 1, 16, 0, levels.astype(">u2").tobytes(), (b"tRNS", b"\0\xff"))
    assert decode_image(keyed).getpixel((1, 0)) == (255, 255, 255)


def test_16_bit_colour_and_interlace() -> None:
    rgb = np.array([[[65535, 0, 32768]]], ">u2").tobytes()
    assert decode_image(png_of(1, 1, 16, 2, rgb)).getpixel((0, 0)) == (255, 0, 128)


# Malformed


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
    "text chunk bomb": (
        png_of(8, 8, 8, 0, b"\0" * 64, (b"zTXt", b"k\0\0" + zlib.compress(b"x" * 50_000_000))),
        "damaged or incomplete",
    ),
    "strip": (pictures.encoded(pictures.flat(2010, 10, "red")), "one side may be 200 times"),
    "too many bytes": (PNG + b"\0" * (21 << 20), "20971520 are the limit"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_images_are_refused_with_a_reason(name) -> None:
    data, words = MALFORMED[name]
    with pytest.raises(BadImage, match=words):
        prepare_image(data, RULES)


def test_a_false_label_is_refused() -> None:
    with pytest.raises(BadImage, match="declared as PNG but its bytes are JPEG"):
        prepare_image(JPEG, RULES, declared="PNG")
    assert prepare_image(JPEG, RULES, declared="JPEG").tokens


def test_the_stated_pixel_limit_is_the_limit() -> None:
    side = 5792  # 5792 * 5793 is just below 2**25
    assert side * 5793 <= MAX_DECODED_PIXELS < (side + 1) * 5793
    small = RULES.limited(4, 64)
    data = pictures.encoded(Image.new("1", (side, 5793)))
    assert prepare_image(data, small).tokens <= 64
    with pytest.raises(BadImage, match="are the limit"):
        prepare_image(pictures.encoded(Image.new("1", (side + 1, 5793))), small)


@pytest.mark.filterwarnings("ignore")  # decoders remark on what they skip
def test_a_thousand_damaged_images_neither_crash_nor_fill_the_memory() -> None:
    rng = random.Random(7)
    bases = [PNG, JPEG, WEBP, GIF, BMP]
    bases.append(pictures.encoded(Image.new("RGBA", (40, 40), (9, 9, 9, 9))))
    bases.append(pictures.encoded(pictures.noise(30, 30).convert("P"), "PNG"))
    bases.append(pictures.encoded(pictures.noise(33, 31), "JPEG", progressive=True))
    rules = RULES.limited(4, 16)
    refused = longest = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(1000):
        data = bytearray(bases[number % len(bases)])
        for _ in range(rng.choice((1, 2, 8, 40))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            image = prepare_image(bytes(data), rules)
        except BadImage as error:
            refused += 1
            longest = max(longest, len(str(error)))
        else:
            assert image.tokens <= 16
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert 200 < refused < 1000
    assert longest < 300
    assert grown_kib < 600 << 10  # one image of the most pixels, as RGBA and as RGB, fits twice


def test_pixels_are_not_kept_in_floats() -> None:
    image = prepare_image(pictures.encoded(pictures.noise(256, 256)), RULES)
    assert image.patches_PV.nbytes == 256 * 256 * 3
