"""A serving install works without the libraries of the extra `train`; other commands name it."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import click
import pytest
import typer.main

from recserve.cli import app
from recserve.extras import COMMANDS as COMMAND_EXTRAS
from recserve.extras import EXTRAS, FAISS, install_advice
from tests.support.grids import chosen
from tests.support.paths import ROOT
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


def list_commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Yields each command with what it requires, on files and a server that do not exist."""
    for name, sub in getattr(command, "commands", {}).items():
        yield from list_commands(sub, (*path, name))
    if not hasattr(command, "commands"):
        words = list(path)
        for one in (one for one in command.params if one.required):
            kind = getattr(getattr(one, "type_descriptor", None), "annotation", str)
            value = URL if one.name == "url" else "1" if kind in (int, float) else "none"
            words += [value] if one.param_type_name == "argument" else [one.opts[0], value]
        yield words


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
URL = "http://127.0.0.1:9"
ALL = typer.main.get_command(app)
RAY = ["batch", "--input", "none", "--output", "none", "--bundle", "none", "--engine", "ray"]
COMMAND_LINES = [*list_commands(ALL), RAY]
EXPERIMENTS = """
experiments:
  - name: shelf
    use: recommend
    arms:
      - {name: one}
      - {name: two, fields: {strategy: beam}}
"""
MODULES = sorted({module for modules in EXTRAS.values() for module in modules})


def end_of_commands(folder, hidden, commands):
    """Runs commands where modules are missing, and returns the line that each ends with."""
    (folder / "experiments.yaml").write_text(EXPERIMENTS)
    hide = f"import sys\nfor name in {list(hidden)}:\n    sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hide + COMMANDS, json.dumps(commands)],
        capture_output=True, text=True, timeout=600, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    parts = re.split(r"^status (\d+)\n", done.stderr, flags=re.MULTILINE)
    assert len(parts) == 2 * len(commands) + 1, done.stderr
    return [(part.strip().splitlines() or [""])[-1] for part in parts[:-1:2]]


def check_advice(command, line, hidden):
    """A line that names something to install names an extra that has a missing module."""
    if "pip install" not in line:
        return False
    named = re.fullmatch(
        r"error: (.*) needs (\S+): pip install 'recserve\[(\w+)\]'; "
        r"in a checkout, pip install -c constraints\.txt -e '\.\[\3\]'",
        line,
    )
    assert named is not None, (command, line)
    _, package, extra = named.groups()
    assert package in {EXTRAS[extra][module] for module in hidden if module in EXTRAS[extra]}
    return extra


NEEDED = {
    "demo": "train", "build": "train", "evaluate": "train", "bench": "bench", "ab": "bench",
    "train ranker": "train", "train recommender": "train", "bundle load": "client",
    "bundle rollback": "client", "bundle status": "client", "experiments plan": "experiments",
}  # fmt: skip


def test_a_serving_install_names_the_extra_of_each_command(tmp_path):
    """Before the command reads or computes anything."""
    served = ["serve", "--bundle", str(shared_bundle()), "--port", "0"]
    commands = [
        *(words for words in COMMAND_LINES if words != ["doctor"]),
        [*served, "--otlp-endpoint", URL],
        [*served, "--experiments", "experiments.yaml"],
    ]
    lines = end_of_commands(tmp_path, MODULES, commands)
    found = {
        " ".join(words): check_advice(words, line, MODULES)
        for words, line in zip(commands, lines, strict=True)
    }
    for name, extra in NEEDED.items():
        given = {found[words] for words in found if f"{words} ".startswith(f"{name} ")}
        assert given == {extra}, (name, given)
    assert [found[" ".join(words)] for words in commands[-3:]] == ["ray", "otel", "experiments"]


@pytest.mark.parametrize("module", chosen(MODULES, "scipy"))
def test_a_command_without_one_module_names_its_extra(tmp_path, module):
    commands = [words for words in COMMAND_LINES if words[0] not in ("doctor", "demo")]
    lines = end_of_commands(tmp_path, [module], commands)
    for words, line in zip(commands, lines, strict=True):
        check_advice(words, line, [module])


def test_the_table_of_extras_is_that_of_the_package():
    declared = {
        extra: {re.match(r"[\w.-]+", one)[0] for one in needed}
        for extra, needed in PROJECT["optional-dependencies"].items()
    }
    assert EXTRAS.keys() == declared.keys() - {"docs", "fuzz", "mutants", "dev"}
    for extra, modules in EXTRAS.items():
        assert set(modules.values()) <= declared[extra]
    assert all(extra in EXTRAS for extra in COMMAND_EXTRAS.values())
    assert COMMAND_EXTRAS.keys() <= {words[0] for words in COMMAND_LINES}


def test_every_import_is_of_a_dependency_or_in_the_table():
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["client"]]
    waiting = [re.match(r"[\w.-]+", one)[0] for one in needed]
    installed = set()
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in installed:
            continue
        installed.add(name)
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [re.match(r"[\w.-]+", one)[0] for one in needed if "extra ==" not in one]
    homes = importlib.metadata.packages_distributions()
    for path in sorted((ROOT / "recserve").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for module in {name.partition(".")[0] for name in names}:
                if module in {*sys.stdlib_module_names, "recserve", *MODULES, "opentelemetry"}:
                    continue
                packages = {home.lower().replace("_", "-") for home in homes.get(module, ())}
                assert packages & {*installed, "pyyaml"}, f"{path}: {module}"


def test_python_names_what_to_install(tmp_path):
    done = run("from recserve import build_bundle")
    assert done.stderr.splitlines()[-1].endswith(f"needs scipy: {install_advice('train')}")


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
