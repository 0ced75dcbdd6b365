"""Signatures of thinking blocks: opaque to clients, which send them back.

Where thoughts are shown, the signature is a digest of the text; nobody checks it. Where a request
wants them omitted, the signature is the thought itself, so that the next turn's prompt has it and
the kept state of this turn fits.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_DIGEST, _TEXT = "civetta.d.", "civetta.t."


def sign(thought: str, *, shown: bool) -> str:
    """The signature of a thinking block."""
    if shown:
        return _DIGEST + _base64(hashlib.sha256(thought.encode()).digest())
    return _TEXT + _base64(thought.encode())


def thought_of(text: str, signature: str) -> str:
    """The thought of a block that came back: its text, or what its signature carries."""
    if text or not signature.startswith(_TEXT):
        return text
    try:
        return base64.b64decode(signature[len(_TEXT) :], validate=True).decode()
    except (binascii.Error, ValueError):  # another server's, or cut short
        return ""


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
