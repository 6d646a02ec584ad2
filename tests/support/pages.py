"""The pages of the repository, and what is wrong in each."""

from collections.abc import Callable, Collection

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
