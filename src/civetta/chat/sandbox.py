"""A Jinja environment for chat templates out of files: as transformers sets it up, and bounded.

A template is someone else's program. It runs sandboxed; its loops, calls, ranges, value sizes and
output are counted, so that it can end in an error but neither run for ever nor fill the memory.
Not counted: string methods and filters that pad or replace (`center`, `replace`) within one step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from civetta.errors import CheckpointMalformed, TemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Context

_METER = "__civetta_meter"
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """What one rendering may use.

    `output_chars` also bounds any value that the template builds by `+`, `~` or `*`; a step is one
    loop turn, one element of a range, or one call.
    """

    output_chars: int = 128 * 262_144  # 128 a token of the native context, as peers allow
    steps: int = 2_000_000


class BoundedTemplate:
    """One compiled template; immutable, safe to share between threads.

    Raises CheckpointMalformed when `source` does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._limits = limits or TemplateLimits()
        environment = _environment(now)
        try:
            tree = _metered(environment.parse(source), environment)
            self._template = jinja2.Template.from_code(
                environment, environment.compile(tree), dict(environment.globals)
            )
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise CheckpointMalformed(
                f"The chat template does not compile{f' (line {line})' if line else ''}: {error}."
                " Repair it or give another template."
            ) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; raises TemplateError when the template refuses, fails or passes a limit."""
        meter = _Meter(self._limits)
        chunks: list[str] = []
        chars = 0
        try:
            for chunk in self._template.generate({**variables, _METER: meter}):
                chars += len(chunk)
                meter.check_size(chars)
                chunks.append(chunk)
        except _TEMPLATE_FAULTS as error:
            reason = str(error) or type(error).__name__
            raise TemplateError(
                f"The chat template cannot render these messages: {reason}.",
                param="messages",
            ) from error
        return "".join(chunks)


class _Meter:
    """Counts what one rendering has used."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._steps = 0

    def spend(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > self._limits.steps:
            _overrun(f"it takes more than {self._limits.steps} steps")

    def check_size(self, chars: int) -> None:
        if chars > self._limits.output_chars:
            _overrun(f"it makes a text or list longer than {self._limits.output_chars}")


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with calls counted and the operators that can blow up a value checked."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _meter_of(__context).spend()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter_of(context)
        sized = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
        if operator == "+":
            meter.check_size(sum(sized))
        elif operator == "*" and sized:
            times = right if isinstance(right, int) else left
            meter.check_size(sized[0] * times if isinstance(times, int) else 0)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            meter.check_size(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}`, which training templates put around replies; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - the shape that jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment(now: Callable[[], datetime]) -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.filters["_civetta_steps"] = _counted
    environment.filters["_civetta_concat"] = _concatenated
    environment.globals["range"] = _range
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: non-ASCII kept, nothing escaped for HTML, keys in order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _metered(tree: nodes.Template, environment: _BoundedEnvironment) -> nodes.Template:
    # counts loop turns and checks `~` by routing both through filters of our own
    for loop in tree.find_all(nodes.For):
        loop.iter = _filtered(loop.iter, "_civetta_steps")
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name, child in parent.iter_fields():
            if isinstance(child, nodes.Concat):
                setattr(parent, name, _concat_filter(child))
            elif isinstance(child, list):
                child[:] = [_concat_filter(c) if isinstance(c, nodes.Concat) else c for c in child]
    return tree.set_environment(environment)  # type: ignore[return-value]  # returns itself


def _concat_filter(node: nodes.Concat) -> nodes.Filter:
    return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_civetta_concat")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    meter = _meter_of(context)
    for item in items:
        meter.spend()
        yield item


@pass_context
def _concatenated(context: Context, items: Sequence[Any]) -> str:
    texts = [str(item) for item in items]
    _meter_of(context).check_size(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _range(context: Context, *bounds: int) -> range:
    numbers = range(*bounds)
    _meter_of(context).spend(len(numbers))
    return numbers


def _meter_of(context: Context) -> _Meter:
    meter = context.get(_METER)
    if not isinstance(meter, _Meter):
        raise jinja2.exceptions.SecurityError("the template hides the counter of its steps")
    return meter


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _overrun(what: str) -> NoReturn:
    raise jinja2.exceptions.SecurityError(f"{what}, which is refused")
