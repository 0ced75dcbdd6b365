"""A Jinja environment for chat templates out of files: as transformers sets it up, and bounded.

A template is someone else's program. It runs sandboxed, nothing of it runs when it is compiled, and
what it builds and how long it works is counted (`sandbox_meter`), so that it can end in an error but
neither run for ever nor fill the memory.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from civetta.chat.json_text import json_text
from civetta.chat.sandbox_growth import (
    FILTER_CHARS,
    METHOD_CHARS,
    REFUSED_FILTERS,
    REFUSED_METHODS,
    format_chars,
)
from civetta.chat.sandbox_meter import Meter, QuietNamespace, TemplateLimits, refuse
from civetta.errors import CheckpointMalformed, TemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Context

_METER = "__civetta_meter"
MAX_JSON_INDENT = 16
MAX_REASON_CHARS = 1000
MAX_SOURCE_CHARS = 1 << 17
"""Templates in circulation have some ten thousand; the compiler's time grows with them."""
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    SyntaxError,  # what Jinja makes of some templates is no Python: twenty loops in each other
)


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
        if len(source) > MAX_SOURCE_CHARS:
            raise CheckpointMalformed(
                f"The chat template has {len(source)} characters, more than {MAX_SOURCE_CHARS}."
                " Give another template."
            )
        try:
            tree = _metered(environment.parse(source), environment)
            self._template = jinja2.Template.from_code(
                environment, environment.compile(tree), dict(environment.globals)
            )
        except _TEMPLATE_FAULTS as error:
            line = getattr(error, "lineno", None)
            raise CheckpointMalformed(
                f"The chat template does not compile{f' (line {line})' if line else ''}:"
                f" {str(error) or type(error).__name__}."
                " Repair it or give another template."
            ) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; raises TemplateError when the template refuses, fails or passes a limit."""
        meter = Meter(self._limits)
        chunks: list[str] = []
        chars = 0
        try:
            for chunk in self._template.generate({**variables, _METER: meter}):
                chars += len(chunk)
                meter.check_size(chars)
                chunks.append(chunk)
        except _TEMPLATE_FAULTS as error:
            reason = (str(error) or type(error).__name__)[:MAX_REASON_CHARS]
            raise TemplateError(
                f"The chat template cannot render these messages: {reason}.",
                param="messages",
            ) from error
        return "".join(chunks)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with calls counted and all that can blow up a value checked before it does."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Meter) or attr in REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter_of(__context)
        meter.spend()
        _check_method(meter, __obj, args, kwargs)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter_of(context)
        _check_operands(meter, operator, left, right)
        return meter.made(super().call_binop(context, operator, left, right))


def _check_method(meter: Meter, method: Any, args: Any, kwargs: Any) -> None:
    """Stop a method of a text whose result would be too long."""
    owner = getattr(getattr(method, "__wrapped__", method), "__self__", None)  # format is wrapped
    if not isinstance(owner, (str, bytes)):
        return
    name = getattr(method, "__name__", "")
    if name in ("format", "format_map"):
        meter.build(format_chars(owner, meter.weigh([args, kwargs])))
    elif name == "join":
        meter.build(_joined_chars(meter, args[0] if args else (), owner))
    elif name in METHOD_CHARS:
        meter.build(METHOD_CHARS[name](owner, *args, **kwargs))


def _check_operands(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Stop an operation whose result would be too large."""
    sized = [side for side in (left, right) if isinstance(side, (str, bytes, list, tuple))]
    whole = [side for side in (left, right) if isinstance(side, int)]
    if operator == "+":
        meter.check_size(sum(map(len, sized)))
    elif operator == "%" and isinstance(left, (str, bytes)):
        meter.build(format_chars(left, meter.weigh([right])))
    elif operator == "*" and sized and whole:
        length = len(sized[0]) * max(whole[0], 0)
        meter.check_size(length)
        if isinstance(sized[0], (list, tuple)):
            meter.check_nodes(length)
    elif operator == "*" and len(whole) == 2:
        meter.check_int(whole[0].bit_length() + whole[1].bit_length())
    elif operator == "**" and len(whole) == 2:
        meter.check_int(left.bit_length() * max(right, 0))


def _joined_chars(meter: Meter, items: Any, separator: Any) -> int:
    if isinstance(items, str):
        return len(items) * (1 + len(separator))
    if not isinstance(items, (list, tuple, dict)):
        return 0  # a generator, whose elements `_counted` and the filters have counted
    return meter.weigh(items) + len(items) * len(separator)


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
        optimized=False,  # else constant expressions are computed, unbounded, by the compiler
    )
    for name in REFUSED_FILTERS:
        del environment.filters[name]
    environment.filters |= {"tojson": _tojson, "sum": _sum}
    environment.filters |= {n: _bounded(n, f) for n, f in environment.filters.items()}
    environment.filters |= _METERS
    del environment.globals["lipsum"]
    environment.globals["namespace"] = QuietNamespace
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
    if indent is not None and not 0 <= indent <= MAX_JSON_INDENT:
        refuse(f"it indents JSON by {indent}")
    if sum(map(len, separators or ())) > MAX_JSON_INDENT:
        refuse("it puts texts of its own between the parts of JSON")
    if not (ensure_ascii or sort_keys) and indent is None and separators is None:
        return json_text(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _metered(tree: nodes.Template, environment: _BoundedEnvironment) -> nodes.Template:
    """Route what the sandbox cannot intercept through filters of our own.

    These are loop turns, `~`, lists and mappings written out, and every piece of output: blocks
    and macros make texts of output.
    """
    for node in [tree, *tree.find_all(nodes.Node)]:
        for name, child in node.iter_fields():
            if isinstance(child, nodes.Node):
                setattr(node, name, _routed(child))
            elif isinstance(child, list):
                child[:] = [_routed(c) if isinstance(c, nodes.Node) else c for c in child]
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "_civetta_steps")
        elif isinstance(node, nodes.Output):
            node.nodes = [_filtered(_as_value(n), "_civetta_out") for n in node.nodes]
    return tree.set_environment(environment)  # type: ignore[return-value]  # returns itself


def _routed(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_civetta_concat")
    if isinstance(node, (nodes.List, nodes.Dict)):
        return _filtered(node, "_civetta_made")
    if isinstance(node, nodes.Tuple) and node.ctx == "load":
        return _filtered(node, "_civetta_made")
    return node


def _as_value(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.TemplateData):
        return nodes.Const(node.data, lineno=node.lineno)
    return node


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
    meter = _meter_of(context)
    texts = [str(item) for item in items]
    meter.build(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _output(context: Context, value: Any) -> str:
    text = str(value)
    _meter_of(context).build(len(text))
    return text


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _meter_of(context).made(value)


_METERS = {
    "_civetta_steps": _counted,
    "_civetta_concat": _concatenated,
    "_civetta_out": _output,
    "_civetta_made": _made,
}


@pass_context
def _sum(context: Context, items: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """The `sum` filter, each addition checked: lists and texts grow with the square of theirs."""
    environment = context.environment
    assert isinstance(environment, _BoundedEnvironment)
    for item in items:
        value = item if attribute is None else environment.getitem(item, attribute)
        start = environment.call_binop(context, "+", start, value)
    return start


_LEADS: Mapping[str, Callable[[Context], tuple[Any, ...]]] = {
    "": lambda _: (),
    "context": lambda context: (context,),
    "eval_context": lambda context: (context.eval_ctx,),
    "environment": lambda context: (context.environment,),
}
"""What Jinja's own filters ask to be given before the value."""


def _bounded(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `inner`, its result bounded before and counted after it is made."""
    lead = _LEADS[getattr(getattr(inner, "jinja_pass_arg", None), "name", "")]

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter_of(context)
        meter.spend()
        if name in FILTER_CHARS:
            meter.build(FILTER_CHARS[name](value, *args, **kwargs))
        elif name == "format":
            meter.build(format_chars(value, meter.weigh([args, kwargs])))
        elif name == "join":
            value = value if isinstance(value, str) else list(value)
            separator = args[0] if args else kwargs.get("d", "")
            meter.build(_joined_chars(meter, value, str(separator)))
        return meter.made(inner(*lead(context), value, *args, **kwargs))

    return run


@pass_context
def _range(context: Context, *bounds: int) -> range:
    numbers = range(*bounds)
    _meter_of(context).spend(len(numbers))
    return numbers


def _meter_of(context: Context) -> Meter:
    meter = context.get(_METER)
    if not isinstance(meter, Meter):
        refuse("it hides the counter of its steps")
    return meter


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
