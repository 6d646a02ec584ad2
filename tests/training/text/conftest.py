"""The target of drafters that are trained in seconds, and a text that it writes."""

import numpy as np
import pytest

from tests.support.drafter_training import ROWS, WINDOW, write_text
from tests.support.text_plain import drawn_model


@pytest.fixture(scope="module")
def model():
    return drawn_model(0)


@pytest.fixture(scope="module")
def text(model) -> np.ndarray:
    """What the target writes by itself, many rows side by side."""
    return write_text(model, ROWS, WINDOW, 0.3)
