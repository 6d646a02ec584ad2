"""Who may import whom, the links at the top, and what is never used."""

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "recserve"

TENSORS = {"kernels", "models"}
DECODING = TENSORS | {"core", "search", "speculation"}
STEP = DECODING | {"engine"}
SERVICE = STEP | {"features", "tokenizer", "schemas", "bundle", "metrics"}
TOP = SERVICE | {"service", "config"}

# room -> rooms it may import besides itself. A room is a folder or a file directly under recserve/.
MAY_IMPORT = {
    "kernels": set(),
    "features": set(),
    "tokenizer": set(),
    "schemas": set(),
    "metrics": set(),
    "config": set(),
    "models": {"kernels"},
    "core": TENSORS,
    # How items are found and how text is drafted know nothing of each other, nor of the engine.
    "search": TENSORS | {"core"},
    "speculation": TENSORS | {"core"},
    "engine": DECODING,
    "bundle": TENSORS | {"features"},
    "service": SERVICE,
    "training": TOP,
    "server": TOP | {"experiments"},
    "batch": TOP,
    "experiments": {"schemas"},
    "client": {"schemas"},
    "cli": TOP | {"training", "server", "batch", "experiments", "client"},
    "__main__": {"cli"},
    "__init__": TOP,
}

# Third-party packages that one room (or one file) owns.
OWNERS = {
    "fastapi": {"server"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "redis": {"features/history/redis_store.py"},
    "lmdb": {"features/history/lmdb_store.py"},
    "faiss": {"features"},
    "tokenizers": {"tokenizer"},
    "jinja2": {"tokenizer"},
    "aiohttp": {"experiments"},
    "httpx": {"client", "cli/bundle_swap.py", "server/arms/arm_server.py"},
    "opentelemetry": {"server/telemetry/traces.py"},
    "ray": {"batch/ray_workers.py", "server/ray_serve.py"},
    # The extra `train`; a serving install has none of them.
    "sklearn": {"features/vectors/vectors.py"},
    "scipy": {"features/vectors/vectors.py", "experiments"},
    "matplotlib": {"training"},
}
TENSOR_LIBRARIES = {"torch", "numpy", "safetensors", "triton"}
NEVER_IMPORTED = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
LINKS = ("kernels", "models", "features")


@dataclass(frozen=True)
class Import:
    """One imported module, as a dotted absolute name."""

    name: str
    line: int


def imports(source: str) -> list[Import]:
    """Every import of the source, inside functions and type-checking blocks too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.append(Import("." * node.level + (node.module or ""), node.lineno))
            elif node.module == "recserve":
                found += [Import(f"recserve.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append(Import(node.module or "", node.lineno))
    return found


def violations(path: str, source: str) -> list[str]:
    """What a file of the package imports against the order. path: relative to recserve/, posix."""
    room = path.split("/")[0].removesuffix(".py")
    wrong = []
    for item in imports(source):
        top, _, rest = item.name.partition(".")
        where = f"recserve/{path}:{item.line}"
        if item.name.startswith("."):
            wrong.append(f"{where} imports {item.name}: write the full name")
        elif top == "recserve":
            other = rest.split(".")[0] if rest else "__init__"
            if other != room and other not in MAY_IMPORT.get(room, set()):
                wrong.append(f"{where} imports {item.name}: {room} may not import {other}")
        elif top in LINKS:
            wrong.append(f"{where} imports {item.name}: write recserve.{item.name}")
        elif top in NEVER_IMPORTED:
            wrong.append(f"{where} imports {item.name}: nothing here is pickled")
        elif top == "torch" and room == "features":
            wrong.append(f"{where} imports {item.name}: features knows no torch")
        elif top in OWNERS and not {room, path} & OWNERS[top]:
            wrong.append(f"{where} imports {item.name}: only {sorted(OWNERS[top])} may")
        elif room in STEP and top not in TENSOR_LIBRARIES | sys.stdlib_module_names:
            wrong.append(f"{where} imports {item.name}: {room} needs torch and numpy only")
    return wrong


def pickled(source: str) -> list[int]:
    """Lines that load or save through pickle: torch.load, torch.save, allow_pickle=True."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in {"load", "save"}
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            lines.append(node.lineno)
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        ):
            lines.append(node.value.lineno)
    return lines


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_room_is_in_the_order():
    rooms = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in package_files()}
    assert rooms <= set(MAY_IMPORT), f"new rooms: {sorted(rooms - set(MAY_IMPORT))}"


def test_imports_go_down_the_order():
    wrong = []
    for path in package_files():
        wrong += violations(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
    assert not wrong, "\n".join(wrong)


def test_the_order_has_no_circle():
    """Repeatedly take away the rooms that need no room that is left; all must go."""
    left = {room: set(needs) - {room} for room, needs in MAY_IMPORT.items()}
    while left:
        free = {room for room, needs in left.items() if not needs & set(left)}
        assert free, f"rooms that import each other: {sorted(left)}"
        left = {room: needs for room, needs in left.items() if room not in free}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/tree.py", "from recserve.models.config import DecoderConfig"),
        ("features/tables/events.py", "import torch"),
        ("search/prefixes.py", "from recserve.engine.engine import Engine"),
        ("search/verify.py", "from recserve.speculation.drafter import Drafter"),
        ("speculation/drafters/ngram.py", "from recserve.search.beams import Beams"),
        ("features/tables/events.py", "def f():\n    from recserve.bundle.bundle import Bundle"),
        ("engine/engine.py", "import msgspec"),
        ("service.py", "from recserve import server"),
        ("service.py", "import redis.asyncio"),
        ("service.py", "from . import messages"),
        ("training/loop.py", "from recserve.server.app import create_app"),
        ("batch/job.py", "from fastapi import FastAPI"),
        ("cli.py", "import models"),
        ("cli.py", "from features.items import read_items"),
        ("bundle.py", "import pickle"),
        ("models/ranker.py", "import recserve"),
    ],
)
def test_a_wrong_import_is_found(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/tree.py", "import torch, math, numpy\nfrom dataclasses import dataclass"),
        ("engine/engine.py", "from recserve.search.prefixes import BeamDrafter"),
        ("features/history/redis_store.py", "import redis"),
        ("cli.py", "def serve():\n    from recserve.server.app import create_app"),
        ("service.py", "from recserve.bundle.bundle import Bundle\nimport msgspec"),
    ],
)
def test_a_right_import_is_not_found(path, source):
    assert violations(path, source) == []


def test_nothing_is_pickled():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in package_files()
        for line in pickled(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "source", ["torch.load('x')", "save = torch.save", "np.load('x', allow_pickle=True)"]
)
def test_pickling_is_found(source):
    assert pickled(source) == [1]
    assert pickled("np.load('x', allow_pickle=False)\nmodel.load('x')") == []


def test_no_bare_imports_outside_the_package():
    wrong = []
    for folder in ("tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for item in imports(path.read_text(encoding="utf-8")):
                if item.name.split(".")[0] in LINKS:
                    wrong.append(f"{path.relative_to(ROOT)}:{item.line} imports {item.name}")
    assert not wrong, wrong


@pytest.mark.parametrize("name", LINKS)
def test_link_at_the_top(name):
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"recserve/{name}"
    assert not (PACKAGE / name / "__init__.py").exists()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_links_are_committed():
    listed = subprocess.run(
        ["git", "ls-files", "--stage", *LINKS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == dict.fromkeys(LINKS, "120000")


def test_other_folders_are_packages():
    """Each says in one line what it holds; only the three linked folders are namespaces."""
    linked = {PACKAGE / name for name in LINKS}
    for folder in {path.parent for path in package_files()} - {PACKAGE}:
        if linked & {folder, *folder.parents}:
            continue
        assert (folder / "__init__.py").exists(), f"{folder.relative_to(ROOT)} has no __init__.py"
