"""What `recserve` itself offers: every listed name is there, sorted, and costs nothing unused."""

import subprocess
import sys

import pytest

import recserve


def test_every_public_name_is_there_and_sorted():
    assert recserve.__all__ == sorted(recserve.__all__)
    for name in recserve.__all__:
        assert getattr(recserve, name) is not None
    with pytest.raises(AttributeError, match="public names"):
        recserve.nothing  # noqa: B018


def test_what_runs_no_model_imports_no_torch():
    """The package, the parent of batch workers, and commands that only read or copy files."""
    code = (
        "import sys, recserve, recserve.cli.terminal, recserve.batch.processes\n"
        "import recserve.cli.app, recserve.cli.backup, recserve.cli.bundle_swap\n"
        "import recserve.bundle.bundle, recserve.client, recserve.schemas.experiments\n"
        "import recserve.experiments.conversions\n"
        "import recserve.experiments.verdict, recserve.experiments.live_page\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
