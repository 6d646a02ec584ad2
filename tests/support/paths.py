"""Paths of the repository and of the reference data."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"


def reference(name: str) -> Path:
    """Returns a folder of the reference data; skips the test if it does not exist."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"NO REFERENCE DATA at {folder}: this test did not run")
    return folder
