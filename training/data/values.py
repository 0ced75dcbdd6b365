"""Random values of a given kind, for tool arguments and JSON fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.data import lexicon

if TYPE_CHECKING:
    from training.data.draw import Draw

Value = str | int | float | bool
FIRST_WORDS = 800
ENDINGS = ("txt", "pdf", "csv", "png", "docx", "json", "md", "zip")
COMMANDS = ("ls {f}", "cat {f}.txt", "mkdir {f}", "git log {f}", "python {f}.py", "pwd")
DOMAINS = ("example.com", "example.org", "mail.example", "post.example", "test.example")


def word(draw: Draw) -> str:
    """Return one of the most common words.

    A value that starts a JSON string or a parameter loses the space before its first word, so
    the model has to know both spellings of it: the list is kept short for that reason.
    """
    return draw.choice(lexicon.words()[:FIRST_WORDS])


def phrase(draw: Draw, low: int = 2, high: int = 6) -> str:
    """Return a few random words, now and then with a capital letter."""
    text = " ".join(word(draw) for _ in range(draw.between(low, high)))
    return text.capitalize() if draw.chance(0.4) else text


def _number(draw: Draw, kind: str) -> Value:
    if kind == "float":
        return round(draw.between(1, 99900) / 100, draw.between(1, 2)) + 0.0
    if kind == "year":
        return draw.between(1900, 2035)
    if kind == "bool":
        return draw.chance(0.5)
    return draw.between(1 if kind == "int10" else 0, int(kind.removeprefix("int")))


def _person(draw: Draw, kind: str) -> str:
    first = draw.choice(lexicon.first_names())
    last = draw.choice(lexicon.choices("nouns", "surnames"))
    if kind == "person":
        return first
    if kind == "surname":
        return last
    if kind == "email":
        return f"{first.lower()}{draw.choice(('', '.' + last.lower()))}@{draw.choice(DOMAINS)}"
    return f"{first} {last}"


def _address(draw: Draw, kind: str) -> str:
    if kind == "city":
        return draw.choice(lexicon.choices("places", "cities"))
    if kind == "country":
        countries = [row[1] for row in lexicon.rows("facts") if row[0] == "capital"]
        return draw.choice(countries).removeprefix("the ")
    street = draw.choice(lexicon.choices("places", "streets"))
    return street if kind == "street" else f"{draw.between(1, 199)} {street}"


def _moment(draw: Draw, kind: str) -> str:
    if kind == "time":
        return f"{draw.between(0, 23):02d}:{draw.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"
    return f"{draw.between(2020, 2032)}-{draw.between(1, 12):02d}-{draw.between(1, 28):02d}"


def _computer(draw: Draw, kind: str) -> str:
    name = draw.choice((word(draw), f"{word(draw)}_{word(draw)}", f"{word(draw)}-{word(draw)}"))
    if kind == "folder":
        return name
    if kind == "command":
        return draw.choice(COMMANDS).format(f=name)
    if kind == "url":
        return f"https://{draw.choice(DOMAINS)}/{name}"
    file = f"{name}.{draw.choice(ENDINGS)}"
    return file if kind == "filename" else f"/{word(draw)}/{file}"


def _label(draw: Draw, kind: str) -> str:
    if kind == "code":
        letters = "".join(draw.choice("ABCDEFGHKLMNPRSTUVWXYZ") for _ in range(draw.between(1, 3)))
        return f"{letters}-{draw.between(10, 99999)}"
    if kind == "phone":
        return f"+{draw.between(1, 99)}-{draw.between(100, 999)}-{draw.between(1000, 99999)}"
    if kind == "title":
        return phrase(draw, 1, 4).title()
    if kind == "ticker":
        return "".join(draw.choice("ABCDEFGHIKLMNOPRSTVXZ") for _ in range(draw.between(2, 5)))
    if kind == "expression":
        a, b = draw.between(2, 999), draw.between(2, 999)
        return draw.choice(("{a}+{b}", "{a} * {b}", "{a}-{b}", "{a} / {b}")).format(a=a, b=b)
    return phrase(draw) if kind == "phrase" else word(draw)


def _thing(draw: Draw, kind: str) -> str:
    if kind == "thing":
        noun = draw.choice(lexicon.choices("nouns", "objects"))
        return f"{draw.choice(lexicon.choices('nouns', 'adjectives'))} {noun}"
    plural = {
        "colour": "colours",
        "animal": "animals",
        "food": "foods",
        "job": "jobs",
        "weather": "weathers",
        "language": "languages",
        "currency": "currencies",
    }[kind]
    return draw.choice(lexicon.choices("nouns", plural))


MAKERS = {
    **dict.fromkeys(("float", "year", "bool", "int10", "int100", "int1000"), _number),
    **dict.fromkeys(("person", "surname", "fullname", "email"), _person),
    **dict.fromkeys(("city", "country", "street", "streetno"), _address),
    **dict.fromkeys(("date", "time"), _moment),
    **dict.fromkeys(("filename", "path", "folder", "url", "command"), _computer),
    **dict.fromkeys(("code", "phone", "title", "phrase", "word", "ticker", "expression"), _label),
    **dict.fromkeys(
        ("colour", "animal", "food", "job", "language", "currency", "thing", "weather"), _thing
    ),
}


def value(draw: Draw, kind: str) -> Value:
    """Return a random value; `kind` is a name of `MAKERS` or `enum a,b,c`."""
    if kind.startswith("enum "):
        return draw.choice(kind[5:].split(","))
    return MAKERS[kind](draw, kind)


def schema(kind: str, description: str) -> dict[str, Any]:
    """Return the JSON schema of a kind."""
    if kind.startswith("enum "):
        return {"type": "string", "description": description, "enum": kind[5:].split(",")}
    types = {"bool": "boolean", "float": "number", "year": "integer"}
    name = "integer" if kind.startswith("int") else types.get(kind, "string")
    return {"type": name, "description": description}


def spoken(item: Value) -> str:
    """Return the value as a request names it."""
    if isinstance(item, bool):
        return "true" if item else "false"
    return str(item)
