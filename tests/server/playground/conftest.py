"""One headless browser for the tests of the playground."""

import pytest

from tests.support.chromium import browser


@pytest.fixture(scope="package")
def chromium(tmp_path_factory):
    """A page of a browser of its own."""
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def tab(chromium):
    """The page, 1400 points wide, without what another file's tests have set."""
    chromium.wait(chromium.send("Fetch.disable"))
    chromium.answer, chromium.expected = lambda url: None, ()
    chromium.open("about:blank")
    chromium.problems.clear()
    chromium.size(1400, 900)
    return chromium
