"""Tables and counts as a terminal shows them."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from recserve.cli.terminal import ranking_table, slate_table
from recserve.schemas.items import RankedItem, RecommendedItem


@pytest.mark.parametrize("width", [60, 61, 120])
@pytest.mark.parametrize(
    ("title", "shown"), [("kettle " * 30, "…"), ("[pot]", "[pot]"), (None, "")]
)
def test_tables_fill_the_terminal_and_shorten_titles(title, shown, width):
    items = [RecommendedItem(item_id=i, score=-1.25, rank=1, source="model") for i in "ab"]
    slate = SimpleNamespace(exact=True, strategy="beam", items=items)
    items = [RankedItem(i, 0.5, n, {"click": 0.5}) for n, i in enumerate("abc", 1)]
    ranking = SimpleNamespace(scorer="ranker", items=items)
    for table, name in (
        (slate_table(slate, lambda _: title), "recommend: exact beam"),
        (ranking_table(ranking, lambda _: title, 2), "rank: ranker"),
    ):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(table)
        head, *lines = capture.get().splitlines()
        assert head.strip() == name and [len(line) for line in lines] == [width] * 6
        assert all(shown in line for line in lines[3:5])
