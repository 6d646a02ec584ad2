"""docs/architecture.md names every file of the package, and no file that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def listed() -> set[str]:
    files, folder = set(), ""
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        if heading := re.fullmatch(r"### `(recserve/.*)`", line):
            folder = heading[1].rstrip("/")
        elif row := re.match(r"\| `([\w.]+\.py)` \| \S", line):
            files.add(f"{folder}/{row[1]}")
    return files


def test_every_file_has_its_line():
    package = {p.relative_to(ROOT).as_posix() for p in (ROOT / "recserve").rglob("*.py")}
    plain = {p for p in package if not p.endswith("__init__.py")}
    assert plain - listed() == set(), "files without a line"
    assert listed() - package == set(), "lines without a file"
    assert len(plain) > 50
