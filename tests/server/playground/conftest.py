"""One headless browser for the tests of a file."""

import pytest

from tests.support.chromium import browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    """A page of a new browser, 1400 points wide."""
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.size(1400, 900)
        yield page
