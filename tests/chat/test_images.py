"""Images from bytes to patches: the reference processor, every encoding, and the malformed corpus."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import pictures
from civetta.chat.image_rules import BadImage, ImageRules
from civetta.chat.images import MAX_DECODED_PIXELS, MAX_SCANS, decode_image, prepare_image
from civetta.errors import UsageError
from malformed import JPEG, MALFORMED, many_scans, png_of, run_length_bmp

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


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_images_are_refused_with_a_reason(name) -> None:
    data, words = MALFORMED[name]
    with pytest.raises(BadImage, match=words):
        prepare_image(data, RULES)


def test_what_lies_outside_a_jpegs_picture_is_no_scan_of_it() -> None:
    """As many scans as may be; and the mark of one within a segment, and behind the end."""
    own = many_scans(0).count(b"\xff\xda")
    assert decode_image(many_scans(MAX_SCANS - own)).size == (64, 48)
    with pytest.raises(BadImage, match="scans"):
        prepare_image(many_scans(MAX_SCANS - own + 1), RULES)
    marks = b"\xff\xda" * (2 * MAX_SCANS)
    noted = pictures.encoded(pictures.noise(64, 48), "JPEG", comment=marks)
    assert noted.count(marks) == 1
    assert decode_image(noted + marks).tobytes() == decode_image(JPEG).tobytes()


def test_small_run_length_bitmaps_are_read() -> None:
    rows = b"".join(bytes([4, 10 * row, 4, 200, 0, 0]) for row in range(3)) + b"\0\1"
    found = decode_image(run_length_bmp(8, 3, rows))
    assert [found.getpixel((x, 2 - row))[0] for row in range(3) for x in (3, 4)] == [
        *(0, 200, 10, 200, 20, 200)
    ]


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


def test_a_thousand_damaged_images_neither_crash_nor_fill_the_memory() -> None:
    program = Path(__file__).parents[1] / "image_fuzz.py"
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["read"] + found["refused"] == 1000
    assert min(found["read"], found["refused"]) > 200
    assert found["longest"] < 300
    assert found["grown_kib"] < 600 << 10  # an image of the most pixels, as RGBA and as RGB, twice


def test_pixels_are_not_kept_in_floats() -> None:
    image = prepare_image(pictures.encoded(pictures.noise(256, 256)), RULES)
    assert image.patches_PV.nbytes == 256 * 256 * 3
