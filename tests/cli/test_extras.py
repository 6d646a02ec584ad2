"""A serving install works without the libraries of the extra `train`; other commands name it."""

import subprocess
import sys

import pytest

from tests.support.tiny_bundle import shared_bundle, tiny_bundle

HIDDEN = """
import sys
for name in ("matplotlib", "scipy", "sklearn"):
    sys.modules[name] = None
"""
COMMAND = "from recserve.cli import main\nsys.argv = ['recserve', *sys.argv[1:]]\nmain()\n"
SERVING = """
import recserve.batch.generate, recserve.batch.job, recserve.batch.together, recserve.server.run
from recserve import RecommendRequest, Service
from recserve.schemas.items import ItemsRequest
with Service.open(sys.argv[1]) as service:
    new = {"item_id": "new", "title": "Quiet garden pan"}
    changed = service.put_items(ItemsRequest(items=[new]))
    assert not changed.rejected, changed.rejected
    print(len(service.recommend(RecommendRequest(history=["new"], k=3)).items))
"""


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", HIDDEN + code, *map(str, arguments)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_a_server_needs_no_training_library(tmp_path):
    """Also where a change to the catalogue has text to encode."""
    done = run(SERVING, tiny_bundle(tmp_path))
    assert done.returncode == 0 and done.stdout.strip() == "3", done.stderr


def test_commands_of_a_serving_install_run():
    bundle = shared_bundle()
    for arguments in (
        ["recommend", "--history", "item000001"],
        ["rank", "--item", "item000007", "--history", "item000001"],
    ):
        done = run(COMMAND, *arguments, "--bundle", bundle)
        assert done.returncode == 0, done.stderr
    assert run(COMMAND, "bundle", "verify", bundle).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "--items", "none", "--events", "none", "--out", "none"],
        ["train", "ranker", "--bundle", "BUNDLE"],
        ["evaluate", "--bundle", "BUNDLE"],
        ["demo", "--once"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_names_the_missing_extra(arguments):
    """Before it reads or computes anything."""
    bundle = str(shared_bundle())
    done = run(COMMAND, *(bundle if word == "BUNDLE" else word for word in arguments))
    assert done.returncode == 1
    assert done.stderr.startswith("error: this command needs ")
    assert done.stderr.strip().endswith("pip install 'recserve[train]'")
    assert len(done.stderr.strip().splitlines()) == 1


def test_scale_names_the_extra_ray():
    hidden = "import sys\nsys.modules['ray'] = None\n"
    done = run(hidden + COMMAND, "scale", "--bundle", "none")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: this command needs ray: pip install 'recserve[ray]'\n"
