"""Pictures for tests: noise, flat colours, and every encoding the engine reads."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Random RGB pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def flat(width: int, height: int, colour: str) -> Image.Image:
    """One colour."""
    return Image.new("RGB", (width, height), colour)


def encoded(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    """The bytes of a file."""
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """A data URL."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
