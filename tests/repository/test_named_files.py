"""Docstrings, comments and pages name files and class members that exist."""

import ast
import functools
import re
import subprocess

import pytest

from tests.support.paths import ROOT

ROOMS = tuple(path.name for path in (ROOT / "recserve").iterdir() if path.is_dir())
TOPS = ("recserve", "tests", "benchmarks", "docs", "deploy", *ROOMS)
# A path from the top of the repository or from a room, and the files of tests by name.
NAMED = re.compile(
    rf"(?<![\w./-])((?:{'|'.join(TOPS)})/(?:[\w-]+/)*(?:[\w-]+\.\w+)?|test_\w+\.py)(?![\w*{{<-])"
)
# Source files by name, or by the end of their path.
SOURCE_FILE = re.compile(r"(?<![\w./{}*<-])((?:[\w-]+/)*[\w-]+\.(?:py|c|h))(?![\w*{<-])")
# What other projects wrote, and code with files of the reader.
FOREIGN = re.compile(r"Sources?: [\s\S]*?(?=\n\s*\n|$)|```[\s\S]*?```")
MEMBER = re.compile(r"(?<![\w./])([A-Z]\w*)\.([A-Za-z_]\w*)")
# Strings, which may hold a #, and comments, which are the group.
COMMENT = re.compile(
    r'''(?:"""[\s\S]*?"""|\'{3}[\s\S]*?\'{3}|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|(#.*)'''
)
PLAIN_BASES = {"ABC", "Protocol", "Generic", "object"}


@functools.cache
def committed() -> tuple[str, ...]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(done.stdout.split())


@functools.cache
def committed_names() -> frozenset[str]:
    return frozenset(name.rpartition("/")[2] for name in committed())


@functools.cache
def sources() -> dict[str, str]:
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in committed()
        if name.endswith((".py", ".c", ".h", ".md")) and (ROOT / name).is_file()
    }


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in sources().items() if name.endswith(".py")}


@functools.cache
def prose() -> dict[str, str]:
    """Docstrings and comments of the sources by name, and the whole pages."""
    return {name: prose_of(name, text) for name, text in sources().items()}


def prose_of(name: str, text: str) -> str:
    if name.endswith(".md"):
        return text
    if name not in trees():
        return "\n".join(re.findall(r"/\*.*?\*/", text, re.DOTALL))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(trees()[name]) if isinstance(node, kinds))
    parts = [ast.get_docstring(node, clean=False) or "" for node in nodes]
    return "\n".join(parts + [found for found in COMMENT.findall(text) if found])


def missing_files(text: str) -> list[str]:
    """Returns the paths in a text that name no file and no folder."""
    found = []
    for path in NAMED.findall(text):
        places = (ROOT / path, ROOT / "recserve" / path, ROOT / "tests" / path)
        if not (
            path in committed_names()
            if "/" not in path
            else any(place.exists() for place in places)
        ):
            found.append(path)
    return found


def missing_sources(text: str) -> list[str]:
    """Returns the source files that a text names and that nobody has, whatever their folder."""
    names = SOURCE_FILE.findall(FOREIGN.sub("", text))
    return [name for name in names if name not in path_ends()]


@functools.cache
def path_ends() -> frozenset[str]:
    """Returns every end of every committed path, the whole path and the bare name included."""
    parts = [name.split("/") for name in committed()]
    return frozenset("/".join(own[n:]) for own in parts for n in range(len(own)))


class Members:
    """What the classes of the repository have, their bases included."""

    def __init__(self, trees):
        self.own = {}
        self.bases = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._add(node)

    def _add(self, node):
        own = self.own.setdefault(node.name, set())
        for part in ast.walk(node):
            match part:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                    own.add(name)
        bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        self.bases.setdefault(node.name, set()).update(bases - PLAIN_BASES)

    def has(self, name, member):
        """A base of another library may have anything."""
        if name not in self.own or member in self.own[name]:
            return True
        return any(self.has(base, member) for base in self.bases[name] - {name})


@pytest.mark.slow
def test_files_that_are_named_exist():
    found = {
        name: missing_files(text) + (name != "CHANGELOG.md") * missing_sources(text)
        for name, text in prose().items()
    }
    assert {name: paths for name, paths in found.items() if paths} == {}


@pytest.mark.slow
def test_class_members_that_are_named_exist():
    members = Members(trees().values())
    wrong = [
        f"{name}: {owner}.{member}"
        for name, text in prose().items()
        if name != "CHANGELOG.md"
        for owner, member in MEMBER.findall(text)
        if not members.has(owner, member)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see engine/engine.py and recserve/kernels/cpu/", ["recserve/kernels/cpu/"]),
        ("`docs/text.md`, docs/results/text.md", ["docs/text.md"]),
        ("tests/engine/test_no.py, test_named_files.py", ["tests/engine/test_no.py"]),
        ("vLLM's qwen3_dflash.py, models/*.json, engine/{name}.py", []),
    ],
)
def test_missing_files_are_found(text, missing):
    assert missing_files(text) == missing


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("packed (text_trees.py), kernels/trie/trie.h", []),
        ("columns (trees_of_old.py), runtime/engine.py", ["trees_of_old.py", "runtime/engine.py"]),
        ("As foo.py. Sources: vLLM (a.py,\n    b.py)\n\nSee c9.c.", ["foo.py", "c9.c"]),
        ("```python\n# acme.py\n```\n{name}.py", []),
    ],
)
def test_missing_sources_are_found(text, missing):
    assert missing_sources(text) == missing


def test_missing_members_are_found():
    classes = ("class A(B):\n    x: int\n", "class B(ABC):\n    def run(self): self.y = 1\n")
    members = Members(map(ast.parse, classes))
    assert [members.has("A", name) for name in ("x", "y", "run", "go")] == [True, True, True, False]
    assert members.has("Unknown", "go")
