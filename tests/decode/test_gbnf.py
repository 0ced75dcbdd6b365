"""llama.cpp's grammars as the engine reads them: which texts are whole replies."""

from __future__ import annotations

import re

import pytest

from decode.walking import constraint, guide_of, may_end, say


def fits(grammar: str, text: str) -> bool:
    """Whether the text may be said, and the reply end behind it."""
    guide = guide_of(constraint("gbnf", grammar))
    return say(guide, text) and may_end(guide)


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        ('"x" ([0-9]+)?', "x([0-9]+)?"),
        ('("1"{2}){3}', "(1{2}){3}"),
        ('(("1"+)) ? # ("2"+)?', "1*"),
        ('"x" ( ( digit{2} ) * ) + "y"', "x([0-9]{2})*y"),
        ('"x" (digit+ | "y"+ )?', "x([0-9]+|y+)?"),
        ('"+)?" [+)?]+ "x"', r"\+\)\?[+)?]+x"),
    ],
)
def test_groups_that_are_repeated_twice(rule, pattern):
    grammar = f"root ::= {rule}\ndigit ::= [0-9]\n"
    texts = ["x", "x1", "x12", "xy", "xyy", "x12y", "x1y", "x1212y", "", "1", "111", "111111"]
    texts += ["11111", "+)?+x", "+)?x", "1?", '""', 'x""']
    found = {text for text in texts if fits(grammar, text)}
    assert found == {text for text in texts if re.fullmatch(pattern, text)} != set()
