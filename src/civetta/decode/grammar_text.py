"""Grammars in llguidance's own notation, its bounds, and what it has to say against a grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from civetta.errors import RequestInvalid
from civetta.types import Grammar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llguidance import LLParserLimits

# Texts, sets of characters and comments, which stay; then a group that ends in a repetition or in another
# group, and is repeated itself.
_REPEATED_TWICE = re.compile(
    r"""("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\#[^\n]*)|([*+?})])\s*\)(?=\s*[*+?{])"""
)
_ELSEWHERE = re.compile(r"Resource '([^']*)' is not present in a registry")


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """The texts that are JSON of a schema, which says its own layout."""
    return Grammar(kind="json_schema", text=json.dumps(schema))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the engine says of a grammar: what is wrong with it, and what of a schema it passes over.

    `keywords` are JSON schema's names; `formats` are values of `format`. Either stands for every
    place in the grammar where it is found.
    """

    problem: str | None = None
    keywords: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()


def verdict_on(grammar: Grammar, param: str = "response_format") -> Verdict:
    """What there is to say of a grammar, whatever the vocabulary."""
    from llguidance import LLMatcher

    try:
        text = engine_text(grammar, param)
    except RequestInvalid as error:
        return Verdict(error.message)
    found, messages = LLMatcher.validate_grammar_with_warnings(text, None, limits=work_limits())
    if found:
        return Verdict(_plain(messages[0]))
    return _passed_over(messages)


def problem_of(grammar: Grammar, param: str = "response_format") -> str | None:
    """What is wrong with a grammar, whatever the vocabulary; None when it can be compiled."""
    return verdict_on(grammar, param).problem


def _passed_over(messages: Sequence[str]) -> Verdict:
    """The engine's warnings, which are sentences, as names."""
    keywords, formats = set[str](), set[str]()
    for message in messages:
        kind, _, named = message.partition(": ")
        if kind == "Unimplemented keys":
            keywords |= set(json.loads(named))
        elif kind == "Unknown format":
            formats.add(named)
        elif message.startswith("oneOf"):
            keywords.add("oneOf")
        elif message.startswith("min/maxProperties"):
            keywords |= {"minProperties", "maxProperties"}
        else:
            keywords.add("")  # nothing that is known: the whole of it
    return Verdict(None, frozenset(keywords), frozenset(formats))


def engine_text(grammar: Grammar, param: str) -> str:
    """The grammar in llguidance's own notation. Raises RequestInvalid."""
    from llguidance import LLMatcher

    try:
        match grammar.kind:
            case "json_schema":
                return str(LLMatcher.grammar_from_json_schema(grammar.text))
            case "regex":
                return str(LLMatcher.grammar_from_regex(grammar.text))
            case "lark":
                return str(LLMatcher.grammar_from_lark(grammar.text))
            case "gbnf":
                return str(LLMatcher.grammar_from_lark(_lark_of(grammar.text, param)))
    except ValueError as error:
        refuse(str(error), param)


def _lark_of(gbnf: str, param: str) -> str:
    """llama.cpp's notation as Lark. Raises RequestInvalid."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_kept_apart(gbnf))
    except RecursionError:
        refuse("its groups nest too deeply", param)
    except Exception as error:  # noqa: BLE001 - what the library raises for bad grammars
        refuse(str(error), param)


def _kept_apart(gbnf: str) -> str:
    """The same grammar with an empty text at the end of groups like those of `([0-9]+)?`.

    The conversion drops the parentheses of a group of one thing, and `+?` is nothing in Lark.
    """
    return _REPEATED_TWICE.sub(lambda found: found[1] or f'{found[2]} "")', gbnf)


def first_line(message: str) -> str:
    """The first sentence of an error that may be long."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:200].rstrip(".")


def _plain(message: str) -> str:
    """What is wrong, in words for who sent the schema where the engine's are for its users."""
    elsewhere = _ELSEWHERE.search(message)
    if elsewhere is None:
        return first_line(message)
    return (
        f"it refers to {elsewhere[1][:100]!r}, and nothing outside of the schema is read; put that"
        " part under $defs and refer to #/$defs/NAME"
    )


def refuse(problem: str, param: str) -> NoReturn:
    """Raise the RequestInvalid of a grammar."""
    raise RequestInvalid(
        f"{param} cannot be carried out: {first_line(problem)}.", param=param, code="invalid_schema"
    )


def work_limits() -> LLParserLimits:
    """Work that compiling and one step may take at most: tens of milliseconds, tens of megabytes."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=400_000,
        max_items_in_row=10_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
