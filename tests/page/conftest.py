"""One Chromium for the folder, a tab for each test. Without Chromium (Debian: `apt install
chromium`) the tests that need it are skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from page.chromium import chromium, find_chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

    from page.chromium import Browser, Page


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("needs Chromium or Chrome on the PATH")
    with chromium() as running:
        yield running


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """A tab that must not have complained in the end, but of a server that the test ended first."""
    with browser.page() as page:
        yield page
        assert [one for one in page.problems if "net::ERR_CONNECTION" not in one] == []
