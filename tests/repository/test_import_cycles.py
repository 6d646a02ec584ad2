"""No two files of the package need each other, not even through an import inside a function."""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def module_name(path: Path, root: Path) -> str:
    """Dotted name of a file; a package has the name of its folder."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    """Whether a block is read by type checkers alone."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported(node: ast.AST, modules: set[str]) -> set[str]:
    """The modules of the package that the code imports, at its top or inside functions."""
    named: set[str] = set()
    if isinstance(node, ast.Import):
        named = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        named = {f"{node.module}.{alias.name}" for alias in node.names} & modules
        named = named or {node.module or ""}
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and is_type_checking(node):
        inner = node.orelse
    return (named & modules).union(*(imported(child, modules) for child in inner))


def import_graph(package: Path) -> dict[str, set[str]]:
    """By module: the other modules that it imports."""
    paths = {module_name(path, package.parent): path for path in sorted(package.rglob("*.py"))}
    return {
        name: imported(ast.parse(path.read_text(encoding="utf-8")), set(paths)) - {name}
        for name, path in paths.items()
    }


def way_back(graph: Mapping[str, set[str]], start: str) -> list[str]:
    """A shortest way from a module over its imports to itself; empty where there is none."""
    ways, seen = [[start]], set()
    for way in ways:
        for other in sorted(graph[way[-1]] - seen):
            if other == start:
                return [*way, start]
            seen.add(other)
            ways.append([*way, other])
    return []


def test_no_two_files_need_each_other():
    graph = import_graph(ROOT / "recserve")
    assert len(graph) > 200 and sum(map(len, graph.values())) > 500
    cycles = [found for found in (way_back(graph, start) for start in sorted(graph)) if found]
    assert not cycles, "files that import each other: " + " -> ".join(min(cycles, key=len))


SOURCES = {
    "at the top": ("import p.b", "from p import c", "import p.a"),
    "in a function": ("def f():\n    from p.b import x", "from p import c", "from p.a import y"),
}


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_a_cycle_is_found(sources, tmp_path):
    folder = tmp_path / "p"
    folder.mkdir()
    for name, source in zip("abc", sources, strict=True):
        (folder / f"{name}.py").write_text(source)
    assert way_back(import_graph(folder), "p.a") == ["p.a", "p.b", "p.c", "p.a"]


def test_imports_for_type_checkers_do_not_count(tmp_path):
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "__init__.py").write_text("import p.a")
    (folder / "a.py").write_text("if TYPE_CHECKING:\n    from p.b import x\nelse:\n    import p.c")
    (folder / "b.py").write_text("import p.a\nimport os")
    (folder / "c.py").write_text("")
    assert import_graph(folder) == {"p": {"p.a"}, "p.a": {"p.c"}, "p.b": {"p.a"}, "p.c": set()}
