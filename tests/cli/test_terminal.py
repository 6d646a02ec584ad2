"""Tables and counts as a terminal shows them."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from recserve.cli.terminal import format_count, ranking_table, slate_table
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


@pytest.mark.parametrize("names", [["title"], ["title", "price"], ["price"]])
def test_the_title_is_shown_once(names):
    fields = dict.fromkeys(names, "seen")
    item = RecommendedItem(item_id="a", score=1.0, rank=1, source="model", fields=fields)
    ranked = RankedItem("a", 0.5, 1, {"click": 0.5}, fields=fields)
    for table in (
        slate_table(SimpleNamespace(exact=True, strategy="beam", items=[item]), lambda _: "pot"),
        ranking_table(SimpleNamespace(scorer="ranker", items=[ranked]), lambda _: "pot"),
    ):
        headers = [str(column.header) for column in table.columns]
        assert headers.count("title") == 1 and headers.count("price") == names.count("price")


def test_one_of_a_kind_is_singular():
    counts = [format_count(number, "part") for number in (0, 1, 2, 11)]
    assert counts == ["0 parts", "1 part", "2 parts", "11 parts"]
