"""A serving install works without the libraries of the extra `train`; other commands name it."""

import json
import subprocess
import sys

import pytest

from recserve.extras import FAISS
from tests.support.tiny_bundle import shared_bundle, tiny_bundle

HIDDEN = """
import sys
for name in ("matplotlib", "scipy", "sklearn"):
    sys.modules[name] = None
"""
COMMANDS = """
import json
from recserve.cli import main
for arguments in json.loads(sys.argv[-1]):
    sys.argv = ["recserve", *arguments]
    try:
        main()
    except SystemExit as end:
        print("status", end.code or 0, file=sys.stderr)
"""
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


@pytest.mark.slow
def test_a_serving_install_serves_and_runs_its_commands(tmp_path):
    """Also where a change to the catalogue has text to encode."""
    folder = tiny_bundle(tmp_path)
    bundle, store = ["--bundle", str(shared_bundle())], ["--store", f"lmdb:{tmp_path}/store"]
    commands = [
        ["recommend", "--history", "item000001", *bundle, *store],
        ["rank", "--item", "item000007", "--history", "item000001", *bundle, *store],
        ["bundle", "verify", bundle[1]],
    ]
    done = run(SERVING + COMMANDS, folder, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3\n"), done.stdout
    assert done.stderr.count("status 0") == len(commands), done.stderr


@pytest.mark.slow
def test_a_command_names_the_missing_extra():
    """Before it reads or computes anything."""
    bundle = str(shared_bundle())
    commands = [
        ["build", "--items", "none", "--events", "none", "--out", "none"],
        ["train", "ranker", "--bundle", bundle],
        ["evaluate", "--bundle", bundle],
        ["demo", "--once"],
    ]
    done = run(COMMANDS, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(commands), done.stderr
    assert lines[1::2] == ["status 1"] * len(commands)
    for line in lines[::2]:
        assert line.startswith("error: this command needs ")
        assert line.endswith("-e '.[train]'")


URL = "http://127.0.0.1:9"
NEEDED = [
    ("ray", "ray", ["scale", "--bundle", "none"]),
    ("aiohttp", "bench", ["bench", URL, "--data", __file__]),
    ("httpx", "client", ["bundle", "load", URL, "b"]),
]


@pytest.mark.parametrize(("module", "extra", "command"), NEEDED)
def test_a_command_names_what_to_install(module, extra, command):
    hidden = "for name in ('matplotlib', 'scipy', 'sklearn'):\n    del sys.modules[name]\n"
    hidden += f"sys.modules[{module!r}] = None\n"
    done = run(hidden + COMMANDS, json.dumps([command]))
    assert (done.returncode, done.stdout) == (0, "")
    line, status = done.stderr.splitlines()
    assert line.startswith(f"error: this command needs {module}: ") and status == "status 1"
    assert line.endswith(f"pip install -c constraints.txt -e '.[{extra}]'")


WHEELS = """
import importlib.metadata, importlib.util
from recserve import extras
there = sys.argv[1].split()
def version(name, real=importlib.metadata.version):
    if name not in extras.FAISS:
        return real(name)
    if name in there:
        return "9.9"
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = version
if not there:
    sys.modules["faiss"] = None
"""
BUILD = ["build", "--items", "none", "--events", "none", "--out", "none"]


@pytest.mark.parametrize("there", [(), FAISS[:2], FAISS[1:3], (FAISS[0], FAISS[-1])])
def test_no_faiss_and_two_of_them_are_named_with_what_to_do(there):
    done = run(WHEELS + COMMANDS, " ".join(there), json.dumps([["doctor"], BUILD]))
    assert done.returncode == 0, done.stderr
    failed, line, status = done.stderr.splitlines()
    assert failed == status == "status 1" and "fail" in done.stdout
    assert line.startswith("error: ") and "pip " in line
    for name in there or ("faiss-cpu", "faiss-gpu"):
        assert name in line and name in done.stdout


def test_the_client_names_what_to_install():
    done = run("sys.modules['httpx'] = None\nfrom recserve.client import Client\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("-e '.[client]'")
