"""The service that most tests of this folder ask; a file that needs another makes its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from recserve.service import Service
from tests.support.live_catalogues import opened


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """Over the shared bundle, with an empty store and journal of its own."""
    with opened(tmp_path) as one:
        yield one
