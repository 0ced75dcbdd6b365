"""Addition and subtraction of numbers below one hundred, and small products."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from training.data import lexicon
from training.data.dialogue import Turn, chat
from training.data.draw import split_of
from training.data.sample import Chat, Document

if TYPE_CHECKING:
    from training.data.draw import Draw

ASKS = (
    "What is {e}?",
    "What is {e}?",
    "What's {e}?",
    "what is {e}",
    "How much is {e}?",
    "Calculate {e}.",
    "Compute {e}.",
    "Calculate {e}",
    "{e}",
    "{e}=",
    "{e} =",
    "{e} = ?",
    "{e}=?",
    "{e}?",
    "Please calculate {e}.",
    "Can you calculate {e}?",
    "Tell me the result of {e}.",
    "What is the result of {e}?",
    "What do you get for {e}?",
    "Solve {e}.",
    "What does {e} equal?",
    "What is the value of {e}?",
    "Work out {e}.",
    "Evaluate {e}",
    "What is {e}? Answer with the number only.",
    "What is {e}? Reply with only the number.",
    "Answer with a number: {e}",
)
SIGNS = {
    "+": ("{a}+{b}", "{a}+{b}", "{a} + {b}", "{a} + {b}", "{a} plus {b}"),
    "-": ("{a}-{b}", "{a}-{b}", "{a} - {b}", "{a} - {b}", "{a} minus {b}"),
    "*": ("{a}*{b}", "{a} * {b}", "{a} x {b}", "{a} times {b}"),
}
WORDED = {
    "+": (
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "{n} has {a} {x} and gets {b} more. How many {x} does {n} have now?",
        "There are {a} {x} in one box and {b} {x} in another box. How many {x} are there?",
        "{n} bought {a} {x} and then {b} more. How many {x} did {n} buy?",
    ),
    "-": (
        "Subtract {b} from {a}.",
        "What is the difference between {a} and {b}?",
        "Take {b} away from {a}.",
        "{n} has {a} {x} and gives {b} away. How many {x} are left?",
        "There were {a} {x}. {n} took {b} of them. How many {x} are left?",
    ),
    "*": ("Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
}
THINGS = ("apples", "books", "coins", "stones", "cards", "stamps", "eggs", "flowers", "pencils")


class Problem(NamedTuple):
    """Two operands and the sign between them."""

    a: int
    sign: str
    b: int

    @property
    def result(self) -> int:
        """The right answer."""
        if self.sign == "+":
            return self.a + self.b
        return self.a - self.b if self.sign == "-" else self.a * self.b

    @property
    def key(self) -> str:
        """Name of the item; both orders of a sum, and a difference with its negative, are one."""
        low, high = sorted((self.a, self.b))
        return f"arithmetic {low}{self.sign}{high}"


def _problem(draw: Draw) -> Problem:
    sign = draw.choice("+-") if draw.single or not draw.chance(0.05) else "*"
    low = 10 if draw.single or draw.chance(0.8) else 0
    if sign == "*":
        return Problem(draw.between(0, 12), sign, draw.between(0, 12))
    a, b = draw.between(low, 99), draw.between(low, 99)
    # Most people subtract the smaller number; one in five differences of random operands stays.
    if sign == "-" and a < b and not draw.chance(0.4):
        a, b = b, a
    return Problem(a, sign, b)


def problem(draw: Draw) -> Problem:
    """Draw a problem of the wanted side; products are facts to know, so none is held out."""
    while True:
        candidate = _problem(draw)
        if candidate.sign == "*" or split_of(candidate.key) == draw.split:
            return candidate


def _trace_sum(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10
    first = f"{a % 10} + {b % 10} = {ones}"
    if ones >= 10:
        return f"{first}, write {ones - 10} and carry 1. {a // 10} + {b // 10} + 1 = {tens + 1}."
    return f"{first}. {a // 10} + {b // 10} = {tens}."


def _trace_difference(a: int, b: int) -> str:
    if a < b:
        return f"{a} is less than {b}, so the result is negative. {_trace_difference(b, a)}"
    ones = a % 10 - b % 10
    if ones < 0:
        tens = a // 10 - b // 10 - 1
        borrowed = f"{a % 10} is less than {b % 10}, so borrow 1. {a % 10 + 10} - {b % 10}"
        return f"{borrowed} = {ones + 10}. {a // 10} - {b // 10} - 1 = {tens}."
    return f"{a % 10} - {b % 10} = {ones}. {a // 10} - {b // 10} = {a // 10 - b // 10}."


def trace(problem: Problem) -> str:
    """Return the written working, digit by digit, as the thinking block shows it."""
    a, sign, b = problem
    if sign == "*":
        return f"{a} times {b} is {problem.result}."
    work = _trace_sum(a, b) if sign == "+" else _trace_difference(a, b)
    return f"{work} The answer is {problem.result}."


def turn(draw: Draw) -> Turn:
    """Return one question about one problem."""
    item = problem(draw)
    worded = WORDED[item.sign] if item.result >= 0 else WORDED[item.sign][:2]
    # "The difference between 3 and 8" has no agreed sign.
    if item.sign == "-" and item.result < 0:
        worded = worded[:1]
    if draw.chance(0.75):
        text = draw.choice(ASKS).format(e=draw.choice(SIGNS[item.sign]).format(a=item.a, b=item.b))
    else:
        name = draw.choice(lexicon.first_names())
        text = draw.choice(worded).format(a=item.a, b=item.b, n=name, x=draw.choice(THINGS))
    return Turn(user=text, answer=str(item.result), reasoning=trace(item))


def make(draw: Draw) -> Chat | Document:
    """Return a conversation of one to six problems, or a page of drills."""
    if not draw.single and draw.chance(0.15):
        return _drill(draw)
    count = 1 if draw.single or draw.chance(0.35) else draw.between(2, 6)
    return chat(draw, "arithmetic", "", [turn(draw) for _ in range(count)])


def _drill(draw: Draw) -> Document:
    problems = [problem(draw) for _ in range(draw.between(8, 30))]
    form = draw.choice(("{a}+{b}={r}", "{a} + {b} = {r}"))
    rows = [form.replace("+", p.sign).format(a=p.a, b=p.b, r=p.result) for p in problems]
    return Document(ability="arithmetic", key="", text="\n".join(rows))
