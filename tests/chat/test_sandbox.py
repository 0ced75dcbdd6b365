from __future__ import annotations

import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from civetta.chat.sandbox import BoundedTemplate
from civetta.chat.sandbox_meter import TemplateLimits
from civetta.errors import CheckpointMalformed, TemplateError

MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "é <b> '\"&"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"arguments": {"z": 1, "a": [True, None]}}],
    },
    {"role": "tool", "content": "t"},
]
CONSTRUCTS = [
    "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
    "{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem.role if not loop.last }};"
    "{% endfor %}",
    "{%- for m in messages[::-1] %}\n    {{- loop.revindex ~ m.role ~ '\\n' }}\n{%- endfor %}",
    "{% for m in messages if m.role != 'user' %}{{ m.role }}{% else %}none{% endfor %}",
    "{% for m in [] %}x{% else %}none{% endfor %}",
    "{% for k, v in messages[2].tool_calls[0].arguments|items %}{{ k }}={{ v|tojson }}{% endfor %}",
    "{{ messages|tojson }}{{ messages[2]|tojson(indent=2) }} {{ messages[1].content|tojson|safe }}",
    "{% macro f(x, y=2) %}{{ x ~ '-' ~ y }}{% endmacro %}{{ f(1) + f(3, 4) }}",
    "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i * 2 ** i %}"
    "{% endfor %}"
    "{{ ns.n }} {{ range(2, 9, 3)|list }} {{ 'ab' * 3 }} {{ [1] * 2 + [3] }}",
    "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "  {% if true %}\n  yes\n  {% endif %}\nend {{ undefined_name }}|{{ messages[0].nothing }}",
    "{% generation %}a{% set x = 1 %}b{% endgeneration %}{{ x is defined }}",
    "{{ '%5.1f|%-4s|%%' % (2.25, 'a') }}{{ '{}-{x:>4}'.format(1, x='b') }}{{ '%s'|format('c') }}"
    "{{ 'a,b'.split(',')|join('/') }}{{ [1, 2]|sum }}{{ messages|sum(attribute='n', start=0)"
    " if false }}{{ [[1], [2]]|sum(start=[]) }}{{ 'a\nb'|indent(2) }}{{ 'x'.join(['1', '2']) }}"
    "{{ [1, 2, 3]|batch(2, 0)|list }}{{ 'a-b'.replace('-', '+') }}{{ {'b': 1, 'a': 2}|dictsort }}",
    "{% set x %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ x|upper }}"
    "{% macro q() %}<{{ caller() }}>{% endmacro %}{% call q() %}in{% endcall %}"
    "{% filter upper %}a{{ none }}{% endfilter %}{{ (1, 2) }}{{ {'k': [1]} }}{% set a, b = 1, 2 %}"
    "{% for k, v in {'k': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ messages[0:2]|length }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(',') }}"
    "{{ messages[0].content.startswith('s') }}{{ '  a '|trim }}{{ messages is iterable }}",
]


@pytest.mark.parametrize("source", CONSTRUCTS)
def test_renders_as_transformers_does(source):
    theirs, _ = render_jinja_template([MESSAGES], chat_template=source)
    assert BoundedTemplate(source).render({"messages": MESSAGES}) == theirs[0]


LIMITS = TemplateLimits(output_chars=10_000, built_chars=100_000, steps=10_000, nodes=20_000)
RUNAWAYS = [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% for a in range(10**18) %}{% endfor %}",
    "{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'x' * 10**12 }}",
    "{{ 10**12 * [1] }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% for i in range(5000) %}xxxxxxxx{% endfor %}",
    "{% set n = namespace(t='x') %}{% for i in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "{% set n = namespace(t='x') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "{% set n = namespace(t='x') %}{% for i in range(99) %}{% set n.t = (n.t ~ n.t)|trim %}"
    "{% endfor %}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'.center(10**10) }}{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ ['a']|map('center', 10**10)|list }}",
    "{% filter center(10**10) %}a{% endfilter %}",
    "{% set x = 'a' * 5000 %}{{ x|replace('a', x) }}",
    "{% set x = 'a' * 5000 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 5000 %}{{ x.join(x) }}",
    "{% set x = 'a' * 5000 %}{{ [x, x, x]|join(x) }}",
    "{{ ('a\n' * 1000)|indent(1000000) }}",
    "{{ ('\t' * 1000).expandtabs(1000000) }}",
    "{{ ('a' * 5000)|wordwrap(1, wrapstring='b' * 5000) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%9999999999d'|format(1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10**10) }}",
    "{{ '{x:>9999999999}'.format_map({'x': 1}) }}",
    "{{ [1]|batch(10**10, 0)|list }}",
    "{{ [1]|slice(10**10)|list }}",
    "{{ [1]|tojson(indent=10**10) }}",
    "{{ [1, 1]|tojson(separators=('a' * 9999, 'b' * 9999)) }}",
    "{{ lipsum(n=10**10) }}",
    "{{ (5).to_bytes(10**10, 'big') }}",
    "{{ ([[0] * 2000] * 2000)|sum(start=[])|length }}",
    "{% set n = namespace(x=99) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}"
    "{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set b %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = b %}{% endfor %}",
    "{% for a in range(1000) %}{% set _ = __civetta_meter.spend(-10**6) %}"
    "{% for b in range(9000) %}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", RUNAWAYS)
def test_runaway_templates_end_in_an_error(source):
    with pytest.raises(TemplateError, match="chat template cannot render"):
        BoundedTemplate(source, limits=LIMITS).render({"messages": MESSAGES})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set __civetta_meter = 1 %}{% for i in range(3) %}{% endfor %}",
        "{{ raise_exception('no such thing') }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ undefined_name.x }}",
        "{{ messages[0].content|items|list }}",
    ],
)
def test_escapes_and_faults_are_template_errors(source):
    with pytest.raises(TemplateError, match="chat template cannot render"):
        BoundedTemplate(source).render({"messages": list(MESSAGES)})


def test_time_ends_what_is_made_of_small_steps():
    slow = "{% set x = 'a' * 1000000 %}{% for i in range(900000) %}{% set y = x[1:] %}{% endfor %}"
    with pytest.raises(TemplateError, match=r"more than 0\.1 seconds"):
        BoundedTemplate(slow, limits=TemplateLimits(cpu_s=0.1)).render({})


@pytest.mark.parametrize("source", ["{{ 'a' * 10**12 }}", "{{ 'a'|center(10**12) }}"])
def test_nothing_is_computed_when_a_template_is_compiled(source):
    BoundedTemplate(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1|random }}", "random"),
        ("{{ 1 }}" * 50_000, "350000 characters"),
        ("{{ 9" + "9" * 100_000 + " }}", "4300 digits"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "nested blocks"),
    ],
)
def test_sources_that_cannot_be_compiled_are_refused(source, words):
    with pytest.raises(CheckpointMalformed, match=words):
        BoundedTemplate(source)


def test_raise_exception_carries_its_sentence():
    with pytest.raises(TemplateError, match="no such thing"):
        BoundedTemplate("{{ raise_exception('no such thing') }}").render({})


def test_syntax_errors_are_found_when_the_file_is_read():
    with pytest.raises(CheckpointMalformed, match="line 2"):
        BoundedTemplate("a\n{% if %}")
    with pytest.raises(CheckpointMalformed, match="no_such_filter"):
        BoundedTemplate("{{ 1|no_such_filter }}")


def test_the_clock_is_given():
    noon = datetime.datetime(2026, 3, 4, 12, 0, tzinfo=datetime.UTC)
    template = BoundedTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: noon)
    assert template.render({}) == "04 Mar 2026"


def test_a_template_renders_again_after_a_failure():
    template = BoundedTemplate("{% for i in range(n) %}x{% endfor %}", limits=LIMITS)
    with pytest.raises(TemplateError):
        template.render({"n": 99_999})
    assert template.render({"n": 3}) == "xxx"
