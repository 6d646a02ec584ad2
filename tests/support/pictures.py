"""Trainings of these tests draw no picture, except where one is looked at."""

from collections.abc import Iterator

import pytest

from recserve.training import loop

_SAVE_PLOT = loop.save_plot


@pytest.fixture(scope="package", autouse=True)
def no_pictures() -> Iterator[None]:
    """Drawing takes longer than most of the trainings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_plot", lambda history, selection, path: None)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainings of this test leave their picture."""
    monkeypatch.setattr(loop, "save_plot", _SAVE_PLOT)
