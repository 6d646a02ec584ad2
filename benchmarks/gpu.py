"""Runs all checks and measurements on a GPU: `python benchmarks/gpu.py`; see gpu/suite.py."""

import sys
from pathlib import Path

# The repository's root replaces this folder, so that both packages import from a checkout.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.gpu.suite import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
