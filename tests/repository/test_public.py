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


def test_the_package_and_the_parent_of_batch_workers_import_no_torch():
    code = (
        "import sys, recserve, recserve.cli.terminal, recserve.batch.processes\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
