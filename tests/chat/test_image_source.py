"""Data URLs and files as images, and the placeholders of a prompt."""

from __future__ import annotations

import base64

import pytest

import pictures
from civetta.chat.image_rules import BadImage
from civetta.chat.image_source import file_part, image_part, read_data_url
from civetta.chat.placeholders import expand
from civetta.errors import ImageInvalid, TemplateError

PNG = pictures.encoded(pictures.noise(9, 9))
BODY = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("data:image/png;base64", "PNG"),
        ("data:IMAGE/Png;BASE64", "PNG"),
        ("data:image/png;name=a b.png;base64", "PNG"),
        ("DATA:image/jpg;charset=utf-8;base64", "JPEG"),
        ("data:image/webp;base64", "WEBP"),
        ("data:image/x-ms-bmp;base64", "BMP"),
    ],
)
def test_data_urls_are_read(head, kind) -> None:
    image = read_data_url(f"{head},{BODY}")
    assert (image.data, image.declared) == (PNG, kind)
    wrapped = "\n".join(BODY[i : i + 76] for i in range(0, len(BODY), 76))
    assert read_data_url(f"{head},{wrapped}").data == PNG


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:", "not of the form"),
        ("data:image/png;base64", "not of the form"),
        (f"data:image/png,{BODY}", "not of the form"),
        (f"data:;base64,{BODY}", "type is ''"),
        (f"data:text/html;base64,{BODY}", "type is 'text/html'"),
        (f"data:image/svg+xml;base64,{BODY}", "type is 'image/svg"),
        (f"data:image/png;base64,{BODY[:-1]}!", "its base64 is broken"),
        ("data:image/png;base64,abcde", "its base64 is broken"),
        ("data:image/png;base64,-_-_", "its base64 is broken"),
        ("data:image/png;base64,\u00e4\u00f6", "its base64 is broken"),
    ],
)
def test_broken_data_urls_are_refused(url, words) -> None:
    with pytest.raises(BadImage, match=words):
        read_data_url(url)
    with pytest.raises(ImageInvalid, match="Image 3 cannot be used: .*" + words) as caught:
        image_part(url, index=3, param="messages[0]")
    assert (caught.value.code, caught.value.index) == ("invalid_image", 3)
    assert caught.value.param == "messages[0]"


@pytest.mark.parametrize("url", ["https://x.test/a.png", "http://x.test/a.png"])
def test_addresses_need_the_flag(url) -> None:
    with pytest.raises(ImageInvalid, match="--allow-image-urls is off"):
        image_part(url, index=1, param="p")


def test_only_https_is_fetched() -> None:
    part = image_part("https://x.test/a.png", index=1, param="p", fetch=str.encode)
    assert part.payload.url == "https://x.test/a.png"
    for url in ("http://x.test/a", "ftp://x.test/a", "file:///etc/passwd", "/etc/passwd", "", "x"):
        with pytest.raises(ImageInvalid):
            image_part(url, index=1, param="p", fetch=str.encode)


def test_files_are_read(tmp_path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    encoded = file_part(path, index=1).payload.read()
    assert (encoded.data, encoded.declared) == (PNG, None)
    for missing in (tmp_path / "no.png", tmp_path):
        with pytest.raises(ImageInvalid, match="cannot be read"):
            file_part(missing, index=2)


def test_each_placeholder_becomes_a_run() -> None:
    found = expand([1, 9, 2, 8, 9, 3], [(9, 3), (8, 2), (9, 1)], [9, 8])
    assert found == ((1, 9, 9, 9, 2, 8, 8, 9, 3), (1, 5, 7))
    assert expand([1, 2], [], [9]) == ((1, 2), ())
    for ids, runs in (
        ([1, 9], [(9, 2), (9, 2)]),
        ([9, 9], [(9, 1)]),
        ([1], [(9, 1)]),
        ([8, 9], [(9, 1), (8, 1)]),
    ):
        with pytest.raises(TemplateError, match="images"):
            expand(ids, runs, [9, 8])
