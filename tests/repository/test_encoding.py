"""Text files are read and written as UTF-8, whatever the locale is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import recserve

SOURCES = sorted(Path(recserve.__file__).parent.rglob("*.py"))
# Methods called `open` that open no file; `Path.open` without a mode reads text.
TEXT_MODES = set("rwaxt+")


def unnamed(tree: ast.AST) -> Iterator[int]:
    """Yields the lines of calls that would use the encoding of the locale."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        named = {keyword.arg for keyword in call.keywords}
        name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
        given = [*call.args, *(k.value for k in call.keywords if k.arg == "mode")]
        values = [arg.value for arg in given if isinstance(arg, ast.Constant)]
        if "encoding" in named or "utf-8" in values:
            continue
        modes = [v for v in values if isinstance(v, str) and v and set(v) <= TEXT_MODES]
        plain = isinstance(call.func, ast.Name) and not any(
            isinstance(v, str) and "b" in v for v in values
        )
        if name in ("read_text", "write_text") or (
            name in ("open", "fdopen") and (modes or (plain and name == "open"))
        ):
            yield call.lineno


@pytest.mark.slow
def test_no_file_depends_on_the_locale() -> None:
    found = [f"{path}:{n}" for path in SOURCES for n in unnamed(ast.parse(path.read_bytes()))]
    assert found == []
