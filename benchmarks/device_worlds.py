"""The small engines that the tests compare on every device, for the checks on a real one.

They live in tests/support; the tests are not installed, so the repository's root goes on the path.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.device_worlds import (  # noqa: E402
    Recommending,
    ranking,
    recommending,
    text_engine,
    text_scores,
    texts,
)
from tests.support.walking_model import drawn_language_model, walk  # noqa: E402

__all__ = [
    "Recommending",
    "drawn_language_model",
    "ranking",
    "recommending",
    "text_engine",
    "text_scores",
    "texts",
    "walk",
]
