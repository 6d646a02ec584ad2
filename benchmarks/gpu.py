"""`python benchmarks/gpu.py` checks and measures everything on a GPU; see gpu/suite.py."""

import sys
from pathlib import Path

# In place of this folder, so that `benchmarks` and `recserve` import from a bare checkout.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.gpu.suite import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
