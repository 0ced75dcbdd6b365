"""Tools to declare: written by hand, or composed from verbs, nouns and fields."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from training.data import lexicon, values
from training.data.draw import split_of

if TYPE_CHECKING:
    from training.data.draw import Draw
    from training.data.sample import ToolSpec
    from training.data.values import Value


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its names to choose from, the kind of its values, its description."""

    names: tuple[str, ...]
    kind: str
    description: str


@dataclass(frozen=True, slots=True)
class Family:
    """A tool with several possible names, requests for it, and the shape of its result."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    result: tuple[tuple[str, str], ...]
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool as declared: one name, one name per parameter, and which ones are required.

    `described` tells whether the parameters have descriptions, `closed` whether the schema
    forbids other ones; clients do both.
    """

    name: str
    family: Family
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    described: bool
    closed: bool

    @property
    def purpose(self) -> str:
        """What it is for; a request cannot tell two tools of one purpose apart."""
        family = self.family
        return family.description if family.result else family.requests[0]

    @property
    def spec(self) -> ToolSpec:
        """The declaration in OpenAI's form."""
        properties = {
            name: values.schema(parameter.kind, parameter.description)
            for name, parameter in zip(self.parameters, self.family.parameters, strict=True)
        }
        if not self.described:
            for field in properties.values():
                del field["description"]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": list(self.required),
        }
        if self.closed:
            schema["additionalProperties"] = False
        function = {"name": self.name, "description": self.family.description, "parameters": schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a tool: the request, the call it asks for, the result, the final answer."""

    tool: Tool
    request: str
    arguments: dict[str, Value]
    result: dict[str, Value]
    answer: str


def _split(cell: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in cell.split(","))


def _family(block: list[str]) -> Family:
    """Parse one block of `curated_tools.txt`."""
    names, description = block[0][2:].split(" | ")
    cells = [line[2:].split(" | ") for line in block if line.startswith("p ")]
    result = next(line[2:] for line in block if line.startswith("r "))
    return Family(
        names=_split(names),
        description=description,
        parameters=tuple(Parameter(_split(row[0]), row[1], row[2]) for row in cells),
        requests=tuple(line[2:] for line in block if line.startswith("u ")),
        result=tuple(re.findall(r"(\w+)=(enum \S+|\S+)", result)),
        answer=next(line[2:] for line in block if line.startswith("a ")),
    )


@cache
def families() -> tuple[Family, ...]:
    """Return the tools written by hand."""
    blocks: list[list[str]] = []
    for line in lexicon.lines("curated_tools"):
        if line.startswith("= "):
            blocks.append([])
        blocks[-1].append(line)
    return tuple(_family(block) for block in blocks)


USUAL_STYLES = (0.75, 0.15, 0.1)
EVEN_STYLES = (0.34, 0.33, 0.33)
"""Chances of the styles verb_noun, verbNoun and noun_verb."""


def _styled(draw: Draw, verb: str, noun: str, chances: tuple[float, ...] = USUAL_STYLES) -> str:
    roll = draw.rng.random()
    if roll < chances[0]:
        return f"{verb}_{noun}"
    camel = roll < chances[0] + chances[1]
    return f"{verb}{noun.capitalize()}" if camel else f"{noun}_{verb}"


def _verb_and_noun(draw: Draw, *, unusual: bool = False) -> tuple[str, str]:
    verbs, nouns = lexicon.choices("tool_parts", "verbs"), lexicon.choices("tool_parts", "nouns")
    verb, noun = draw.choice(verbs), draw.choice(nouns)
    if draw.chance(0.45 if unusual else 0.2):
        noun = values.word(draw)
    return verb, noun


def _composed(draw: Draw, verb: str, noun: str, *, unusual: bool = False) -> Family:
    fields: dict[str, Parameter] = {}
    while len(fields) < 1 or (len(fields) < 4 and draw.chance(0.55)):
        name, kind, description = draw.choice(lexicon.rows("fields"))
        if draw.chance(0.15):
            name = f"{values.word(draw)}_{name}"
        fields[name] = Parameter((name,), kind, description)
    description = draw.choice(("{v} {n}.", "{v} {n} with the given data.", "{v} {n} of the user."))
    return Family(
        names=(_styled(draw, verb, noun, EVEN_STYLES if unusual else USUAL_STYLES),),
        description=description.format(v=verb.capitalize(), n=lexicon.with_article(noun)),
        parameters=tuple(fields.values()),
        requests=(f"{verb} {noun}",),
        result=(),
        answer="",
    )


def declare(draw: Draw, family: Family) -> Tool:
    """Choose the names under which a family is declared."""
    chosen: list[str] = []
    for parameter in family.parameters:
        free = [name for name in parameter.names if name not in chosen]
        chosen.append(draw.choice(free or [f"{parameter.names[0]}_{len(chosen)}"]))
    required = tuple(name for i, name in enumerate(chosen) if i == 0 or draw.chance(0.4))
    return Tool(
        name=draw.choice(family.names),
        family=family,
        parameters=tuple(chosen),
        required=required,
        described=draw.chance(0.7),
        closed=draw.chance(0.1),
    )


def composed(draw: Draw, *, unusual: bool = False) -> Tool:
    """Return a composed tool whose name is on the wanted side of the split."""
    while True:
        family = _composed(draw, *_verb_and_noun(draw, unusual=unusual), unusual=unusual)
        if split_of(f"tool {family.names[0]}") == draw.split:
            return declare(draw, family)


def neighbour(draw: Draw, other: Tool) -> Tool:
    """Return a composed tool that shares a word with another: whole names tell them apart.

    Of a composed tool it shares the verb or the noun, of one written by hand a verb of the names
    that such a tool might have (`set_video` beside `create_reminder`); without one, nothing.
    """
    while True:
        verb, noun = _beside(draw, other.family)
        family = _composed(draw, verb, noun, unusual=True)
        if split_of(f"tool {family.names[0]}") == draw.split:
            return declare(draw, family)


def _beside(draw: Draw, family: Family) -> tuple[str, str]:
    """A verb and a noun that are another purpose than the family's."""
    if not family.result:
        old_verb, old_noun = family.requests[0].split(" ")
        while True:
            verb, noun = _verb_and_noun(draw, unusual=True)
            verb, noun = (old_verb, noun) if draw.chance(0.5) else (verb, old_noun)
            if (verb, noun) != (old_verb, old_noun):
                return verb, noun
    known = lexicon.choices("tool_parts", "verbs")
    verbs = sorted({name.split("_")[0] for name in family.names} & set(known))
    own = " ".join(family.names)
    while True:
        verb, noun = _verb_and_noun(draw, unusual=True)
        if noun not in own and noun not in family.description:
            return draw.choice(verbs or [verb]), noun


def tool(draw: Draw) -> Tool:
    """Return a tool to declare; two in five are written by hand."""
    return declare(draw, draw.choice(families())) if draw.chance(0.4) else composed(draw)


def unusual_tool(draw: Draw) -> Tool:
    """Return a tool whose name is hard to guess: it has to be read off the declaration."""
    if not draw.chance(0.5):
        return composed(draw, unusual=True)
    made = declare(draw, draw.choice(families()))
    if not draw.chance(0.6):
        return made
    name = draw.unseen(lambda: _renamed(draw, made.name), lambda name: f"tool {name}")
    return replace(made, name=name)


def _renamed(draw: Draw, name: str) -> str:
    """Another spelling of a name, an addition to it, or a name that has nothing to do with it."""
    words = name.split("_")
    other = values.word(draw).lower()
    turned = "_".join(reversed(words))
    camel = words[0] + "".join(word.capitalize() for word in words[1:])
    forms = (turned, camel, f"{other}_{name}", f"{name}_{other}", f"{words[-1]}_{other}")
    return draw.choice((*forms, f"{other}_{values.word(draw).lower()}"))


POLITE = (
    "{r}.", "{r}.", "Please {l}.", "Can you {l}?", "Could you {l}?", "I want you to {l}.",
    "I need you to {l}.", "{r}, please.", "Use the tool to {l}.", "{l}",
)  # fmt: skip
JOINS = (
    "with {p}",
    "with {p}",
    "with {p}",
    "using {p}",
    "and use {p}",
    "({p})",
    ": {p}",
    "for {p}",
)
PAIRS = (
    "{k} {v}",
    "{k} {v}",
    '{k} "{v}"',
    "{k} = {v}",
    "{k}: {v}",
    "{k} set to {v}",
    "the {k} {v}",
)


def _composed_request(draw: Draw, tool: Tool, arguments: dict[str, Value]) -> str:
    verb, noun = tool.family.requests[0].split(" ")
    article = draw.choice((lexicon.with_article(noun), f"the {noun}", f"my {noun}"))
    pair = draw.choice(PAIRS)
    parts = [
        (pair if isinstance(item, str) else pair.replace('"', "")).format(
            k=name.replace("_", " ") if draw.chance(0.8) else name, v=values.spoken(item)
        )
        for name, item in arguments.items()
    ]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    text = f"{verb} {article} {draw.choice(JOINS).format(p=listed)}".replace(" : ", ": ")
    form = draw.choice(POLITE)
    return form.format(r=text[0].upper() + text[1:], l=text)


def _use_composed(draw: Draw, tool: Tool) -> Use:
    """Give the required parameters and some of the others, in the order of the declaration."""
    arguments = {
        name: values.value(draw, parameter.kind)
        for name, parameter in zip(tool.parameters, tool.family.parameters, strict=True)
        if name in tool.required or draw.chance(0.5)
    }
    fields = [draw.choice(lexicon.rows("fields")) for _ in range(draw.between(1, 3))]
    result: dict[str, Value] = {"status": draw.choice(("ok", "done", "success"))}
    result.update({name: values.value(draw, kind) for name, kind, _ in fields})
    told = [f"The {k.replace('_', ' ')} is {values.spoken(v)}." for k, v in result.items()]
    return Use(
        tool=tool,
        request=_composed_request(draw, tool, arguments),
        arguments=arguments,
        result=result,
        answer=" ".join(told),
    )


def _use_curated(draw: Draw, tool: Tool) -> Use:
    family = tool.family
    request = draw.choice(family.requests)
    given = sorted({int(index) for index in re.findall(r"\{(\d)\}", request)})
    inside = [str(values.value(draw, parameter.kind)) for parameter in family.parameters]
    result = {name: values.value(draw, kind) for name, kind in family.result}
    arguments: dict[str, Value] = {}
    for index in given:
        item = values.value(draw, family.parameters[index].kind)
        arguments[tool.parameters[index]] = item
        inside[index] = values.spoken(item)
    # A request that leaves a parameter out makes that parameter optional: see `fit`.
    told = {name: values.spoken(item) for name, item in result.items()}
    unknown = {int(i) for i in re.findall(r"\{(\d)\}", family.answer)} - set(given)
    answer = "Done." if unknown else family.answer.format(*inside, **told)
    return Use(
        tool=tool,
        request=request.format(*inside),
        arguments=arguments,
        result=result,
        answer=answer,
    )


def use(draw: Draw, tool: Tool) -> Use:
    """Make one request for a declared tool."""
    return _use_curated(draw, tool) if tool.family.result else _use_composed(draw, tool)


def fit(tool: Tool, uses: list[Use]) -> ToolSpec:
    """Return the declaration with only those parameters required that every use gives."""
    spec = tool.spec
    parameters: dict[str, Any] = spec["function"]["parameters"]
    mine = [use for use in uses if use.tool is tool]
    parameters["required"] = [n for n in tool.required if all(n in u.arguments for u in mine)]
    return spec
