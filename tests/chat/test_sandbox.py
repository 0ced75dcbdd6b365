from __future__ import annotations

import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from civetta.chat.sandbox import BoundedTemplate, TemplateLimits
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
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(',') }}"
    "{{ messages[0].content.startswith('s') }}{{ '  a '|trim }}{{ messages is iterable }}",
]


@pytest.mark.parametrize("source", CONSTRUCTS)
def test_renders_as_transformers_does(source):
    theirs, _ = render_jinja_template([MESSAGES], chat_template=source)
    assert BoundedTemplate(source).render({"messages": MESSAGES}) == theirs[0]


LIMITS = TemplateLimits(output_chars=10_000, steps=10_000)
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
