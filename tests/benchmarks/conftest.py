"""The scripts in benchmarks/ import each other by bare names; only tests in this folder do too."""

import sys

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
