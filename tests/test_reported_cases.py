"""Each report of users that concerns the server has a test of its number: `test_case_N_...`."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
REPORTED = {
    "prefix cache": (1, 2, 4, 5, 6, 7, 9, 10, 12, 14, 15),
    "tool calls": (16, 17, 18, 20, 21, 23, 24, 25, 26),
    "reasoning and formats": (28, 30, 32, 33, 34, 35),
    "streams and cancelling": (37, 39, 40, 42, 43, 45),
    "sampling": (46, 47, 49, 50, 51),
    "messages and dialects": (53, 54, 56, 58, 59, 60, 62, 63),
    "scheduling and operation": (65, 67, 68, 70, 71),
}


def test_every_report_has_a_test_of_its_number():
    named: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for numbers in re.findall(r"^def test_case_(\d+(?:_and_\d+)*)_", text, re.MULTILINE):
            named |= {int(number) for number in numbers.split("_and_")}
    wanted = {number for numbers in REPORTED.values() for number in numbers}
    assert wanted <= named, wanted - named
