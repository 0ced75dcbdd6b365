"""Thoughts that travel with their client: `encrypted_content`, which only this server can read.

A stateless client sends each reasoning item back as it got it. The sealed text is exact, so the
next prompt renders as it was sampled; it is encrypted (SHAKE-256 of key and nonce as a keystream)
and then authenticated (HMAC-SHA256), so that nothing but what this server thought comes back in.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

_PREFIX = "civetta.1."
_NONCE_BYTES, _TAG_BYTES = 16, 32


class ThoughtSeal:
    """Seals with the first of its keys, opens with any.

    Keys come from the server's API keys, then from `kept`, a random one that outlives the process,
    so that a restart and a second server with the same of them read what the first one sealed;
    without any it is a key of this process alone.
    """

    def __init__(self, api_keys: tuple[str, ...], kept: bytes | None = None) -> None:
        seeds = [key.encode() for key in api_keys] + ([] if kept is None else [kept])
        seeds = seeds or [secrets.token_bytes(32)]
        self._keys = tuple(_derived(seed) for seed in seeds)

    def seal(self, thought: str) -> str:
        """The thought as text that tells nothing but its length."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hiding, proving = self._keys[0]
        hidden = nonce + _mixed(thought.encode(), hiding, nonce)
        tag = hmac.digest(proving, hidden, "sha256")
        return _PREFIX + base64.b64encode(hidden + tag).decode("ascii")

    def open(self, sealed: str) -> str | None:
        """The thought; None for what was not sealed by one of the keys, or was changed."""
        try:
            data = base64.b64decode(sealed.removeprefix(_PREFIX).encode(), validate=True)
        except (binascii.Error, ValueError):
            return None
        if not sealed.startswith(_PREFIX) or len(data) < _NONCE_BYTES + _TAG_BYTES:
            return None
        hidden, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
        for hiding, proving in self._keys:
            if hmac.compare_digest(hmac.digest(proving, hidden, "sha256"), tag):
                nonce, text = hidden[:_NONCE_BYTES], hidden[_NONCE_BYTES:]
                return _mixed(text, hiding, nonce).decode()
        return None


def _derived(seed: bytes) -> tuple[bytes, bytes]:
    """A key that hides and one that proves; neither tells of the seed."""
    return (
        hmac.digest(seed, b"civetta thought, hiding", "sha256"),
        hmac.digest(seed, b"civetta thought, proving", "sha256"),
    )


def _mixed(text: bytes, key: bytes, nonce: bytes) -> bytes:
    """`text` with the keystream laid over it; twice gives it back."""
    stream = hashlib.shake_256(key + nonce).digest(len(text))
    both = int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")
    return both.to_bytes(len(text), "big")
