"""The pages of the repository, and what is wrong in each."""

import functools
import importlib.util
from collections.abc import Callable, Collection
from types import ModuleType

from tests.support.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def find_in_pages(find: Callable[[str], Collection[str]], *but: str) -> dict[str, Collection[str]]:
    """Returns what a function finds in the texts of the pages, by page; without empty findings.

    Args:
        find: Called with the text of a page.
        but: Names of pages that are left out.
    """
    found = {
        page.relative_to(ROOT).as_posix(): find(page.read_text(encoding="utf-8"))
        for page in PAGES
        if page.name not in but
    }
    return {name: findings for name, findings in found.items() if findings}


@functools.cache
def reference() -> ModuleType:
    """Returns `docs/_build/reference.py`, which writes the generated parts of the pages."""
    source = ROOT / "docs" / "_build" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
