"""What the contracts of import order in pyproject.toml cannot say, and that they see every file."""

import ast
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "recserve"
LINKS = ("kernels", "models", "features")
ENGINE_SIDE = {"kernels", "models", "core", "search", "speculation", "engine"}
TENSOR_LIBRARIES = {"torch", "numpy", "safetensors", "triton"}


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(scope="module")
def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]


@pytest.fixture(scope="module")
def graph(settings) -> grimp.ImportGraph:
    """The graph that `lint-imports` checks."""
    return grimp.build_graph(
        *settings["root_packages"],
        include_external_packages=settings["include_external_packages"],
        cache_dir=None,
    )


def test_the_contracts_see_every_file(graph):
    """A folder without __init__.py is a module without a file."""
    seen = graph.find_descendants("recserve") | {"recserve"}
    namespaces = {
        name for name in seen if not (ROOT / name.replace(".", "/") / "__init__.py").exists()
    } & {".".join(path.parent.relative_to(ROOT).parts) for path in package_files()}
    assert seen - namespaces == {module_name(path) for path in package_files()}
    assert {name.split(".")[1] for name in namespaces} == set(LINKS)


def test_the_engine_side_needs_tensor_libraries_only(graph):
    """The engine side runs on a bare CUDA machine."""
    own = {name for room in ENGINE_SIDE for name in graph.find_descendants(f"recserve.{room}")}
    own |= {f"recserve.{room}" for room in ENGINE_SIDE}
    foreign = {
        (name, other)
        for name in own
        for other in graph.find_modules_directly_imported_by(name)
        if other.split(".")[0] not in TENSOR_LIBRARIES | sys.stdlib_module_names | {"recserve"}
    }
    assert not foreign


def test_no_file_needs_itself(settings):
    """The contract on folders leaves out a folder's own __init__ and what it ignores."""
    graph = grimp.build_graph(
        *settings["root_packages"], exclude_type_checking_imports=True, cache_dir=None
    )
    ways = [
        (name, *back)
        for name in graph.modules
        for other in graph.find_modules_directly_imported_by(name)
        if (back := graph.find_shortest_chain(importer=other, imported=name))
    ]
    assert not ways, "files that import each other: " + " -> ".join(min(ways, key=len))


def pickled_arrays(source: str) -> list[int]:
    """Lines with allow_pickle that is not False. Ruff bans torch.load and torch.save."""
    return [
        node.value.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]


def test_no_array_is_unpickled():
    assert pickled_arrays("np.load('x', allow_pickle=True)") == [1]
    assert pickled_arrays("np.load('x', allow_pickle=False)") == []
    sources = {path: path.read_text("utf-8") for path in package_files()}
    wrong = {path: pickled_arrays(s) for path, s in sources.items() if "allow_pickle" in s}
    assert not {str(path): lines for path, lines in wrong.items() if lines}
