"""Where the repository and the reference data are."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"


def reference(name: str) -> Path:
    """A folder of the reference data; skips where it is not beside the repository."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"NO REFERENCE DATA at {folder}: this test did not run")
    return folder
