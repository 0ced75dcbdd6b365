"""Formats of JSON schema that a bare text can be held to, as regular expressions."""

from __future__ import annotations

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"


def _ipv6() -> str:
    """RFC 4291, section 2.2: eight groups, one run of them left out as `::`, IPv4 in the last two."""
    group = "[0-9A-Fa-f]{1,4}"
    last_two = f"({group}:{group}|{_IPV4})"
    forms = [f"({group}:){{6}}{last_two}"]
    for n_before in range(8):  # groups before `::`, as many or fewer; those behind are counted
        before = f"(({group}:){{0,{n_before - 1}}}{group})?" if n_before else ""
        n_behind = 7 - n_before
        if n_behind >= 2:
            behind = f"({group}:){{{n_behind - 2}}}{last_two}"
        else:
            behind = group if n_behind else ""
        forms.append(f"{before}::{behind}")
    return f"({'|'.join(forms)})"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": r"P([0-9]+W|([0-9]+Y)?([0-9]+M)?([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9]+S)?)?)",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"[A-Za-z0-9!#$%&'*+=?^_`{{|}}~.-]+@{_LABEL}(\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\x22{}|\\^`]+",
}
"""Texts of each format that can be carried out."""
