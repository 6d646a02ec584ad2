"""The table of operations as a section of the HTTP reference.

`python -m tests.support.operation_table` writes it into docs/reference/http.md.
"""

from __future__ import annotations

from recserve.schemas.api import OPERATIONS, Operation, always, have_ids
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "http.md"
BEGIN, END = "<!-- operations: begin -->", "<!-- operations: end -->"
SENT_AGAIN = {always: "yes", have_ids: "if all events have ids"}


def table() -> str:
    """Returns the rows that clients call, in Markdown."""
    lines = [
        "| route | method of the clients | key | queue of | sent again | codes of its own errors |",
        "|---|---|---|---|---|---|",
    ]
    for row in (one for one in OPERATIONS.values() if one.described):
        cells = (
            *(f"`{row.method} {row.path.replace(':path}', '}')}`", f"`{row.name}`", key_of(row)),
            *(queue_of(row), SENT_AGAIN.get(row.repeatable, "no")),
            ", ".join(f"`{code}`" for code in row.errors),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def key_of(row: Operation) -> str:
    """Who may call an operation."""
    if row.admin:
        return "admin"
    return "none" if row.open else "API" if row.counted else "API, no quota"


def queue_of(row: Operation) -> str:
    """The models in whose queue a request waits."""
    if isinstance(row.queue, tuple):
        return " or ".join(row.queue)
    return "; ".join(f"`{name}`: {' or '.join(models)}" for name, models in row.queue.items())


def section(page: str) -> str:
    """Returns the page with the section of today's table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(section(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
