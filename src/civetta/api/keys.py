"""API keys: which a server accepts, compared in a time that does not depend on what was sent."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import TYPE_CHECKING

from civetta.errors import Unauthorized, UsageError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from civetta.options import ServerOptions

_KEY = re.compile("[!-~]+")


class KeyRing:
    """The keys of one server, as digests of equal length; without any, everybody may enter."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def check(self, headers: Headers) -> None:
        """Raise Unauthorized unless the request brings one of the keys, or there are none.

        A key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`.
        """
        if not self._digests:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        bears = scheme.lower() == "bearer"
        given = _digest(bearer.strip() if bears else headers.get("x-api-key", ""))
        # Every key is compared, also after one that fits: the time tells nothing.
        if sum(hmac.compare_digest(given, digest) for digest in self._digests) == 0:
            raise Unauthorized(
                "The API key is missing or wrong: send the server's key as 'Authorization: Bearer"
                " KEY'."
            )


def read_keys(options: ServerOptions) -> tuple[str, ...]:
    """Keys of the settings and of their file. Raises UsageError, which never shows a key."""
    if options.api_key_file is None:
        return options.api_key
    path = Path(options.api_key_file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read the file of --api-key-file, {path}: {error}.") from error
    keys: list[str] = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            raise UsageError(
                f"Line {number} of {path} is no API key: give printable ASCII without spaces."
            )
        keys.append(key)
    if not keys:
        raise UsageError(f"{path}, the file of --api-key-file, has no key: write one a line.")
    return (*options.api_key, *keys)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
