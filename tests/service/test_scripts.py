"""Titles and categories of every script, in any form: at a build, a change, a search, a filter."""

import csv
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.schemas.items import Diversity, Exclusions, ItemsRequest, RecommendRequest
from recserve.service import Service, ServiceOptions
from tests.support.scripts import FORMS, TITLES, in_form

CANONICAL = FORMS[:2]  # forms of one text that filters take for the same
ITEMS = [(title, f"Küche > {script} é") for script in TITLES for title in TITLES[script]]
WORDLESS = "🍕 ★"
DRAW = random.Random(1)


def write(path, columns):
    """Writes columns as a file of its suffix."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[".parquet", ".csv", ".jsonl"])
def built(request, tmp_path_factory):
    """A service over a bundle of ITEMS, each title in a drawn form; and the lines of the build."""
    folder = tmp_path_factory.mktemp("scripts")
    ids = [f"i{n}" for n in range(len(ITEMS) + 1)]
    columns = {
        "item_id": ids,
        "title": [*(in_form(title, DRAW.choice(FORMS)) for title, _ in ITEMS), WORDLESS],
        "categories": [*(in_form(path, DRAW.choice(CANONICAL)) for _, path in ITEMS), "Other"],
    }
    events = {
        "user_id": [f"u{n % 5}" for n in range(3 * len(ids))],
        "item_id": ids * 3,
        "timestamp": [1_700_000_000 + n for n in range(3 * len(ids))],
    }
    options = BuildOptions(
        write(folder / f"items{request.param}", columns),
        write(folder / f"events{request.param}", events),
        folder / "bundle",
        levels=2,
        codes=16,
        collaborative_dim=0,
        split={"categories": "|"},
    )
    lines: list[str] = []
    build_bundle(options, lines.append)
    journal = ServiceOptions(journal=folder / "items")
    with Service.open(folder / "bundle", f"lmdb:{folder}/store", "cpu", journal) as service:
        yield service, lines


def slate(service, **fields):
    """Returns the ids of the most popular items, and the hints about the filter."""
    body = RecommendRequest(
        history=["i0"],
        k=len(ITEMS) + 1,
        strategy="popular",
        exclude=Exclusions(seen=False),
        **fields,
    )
    answer = service.recommend(body)
    return [item.item_id for item in answer.items], answer.filter_hints or []


def test_a_title_has_the_vector_of_its_words(built):
    """Every title gets one, and a new item with the same title in another form gets the same."""
    service, lines = built
    (line,) = [line for line in lines if "usable word" in line]
    assert f"1 of {len(ITEMS) + 1} titles" in line and f"i{len(ITEMS)}" in line
    vectors = service.catalog.current.items.vectors
    assert all(np.asarray(vectors[row]).any() for row in range(len(ITEMS)))
    new = [
        {
            "item_id": f"new-{number}",
            "title": in_form(title, DRAW.choice(FORMS)).upper(),
            "categories": [in_form(path, DRAW.choice(CANONICAL))],
        }
        for number, (title, path) in enumerate(ITEMS)
    ]
    answer = service.put_items(ItemsRequest(items=new))
    assert answer.inserted == len(new) and not answer.rejected
    assert not [one for one in answer.degraded if "word" in one.reason]
    items = service.catalog.current.items
    for number in range(len(ITEMS)):
        row = items.rows_by_key([f"new-{number}"])[0]
        assert np.array_equal(items.vectors[row], items.vectors[number]), ITEMS[number]
    service.catalog.hide(*(one["item_id"] for one in new))


@pytest.mark.parametrize("script", TITLES)
def test_a_search_finds_every_form(built, script):
    service, _ = built
    for number, (title, path) in enumerate(ITEMS):
        if script not in path:
            continue
        for form in FORMS:
            for text in (in_form(title, form), in_form(title.upper(), form)[:200]):
                found = service.items({"query": f" {text} ", "limit": 100}).items
                assert f"i{number}" in [item.item_id for item in found], (title, form)


def test_filters_and_caps_compare_equivalent_texts(built):
    service, _ = built
    for script in TITLES:
        own = {f"i{n}" for n, (_, path) in enumerate(ITEMS) if script in path}
        path = f"Küche > {script} é"
        for form in CANONICAL:
            for tree in (
                {"eq": ["categories", in_form(path, form)]},
                {"in": ["category", [in_form(f"{script} é", form)]]},
            ):
                found, hints = slate(service, filter=tree)
                assert set(found) == own and not hints, tree
        _, hints = slate(service, filter={"eq": ["categories", path.upper()]})
        assert path in str(hints)  # the hint names the value
    found, _ = slate(service, diversity=Diversity(category=1))
    assert len(found) == len(TITLES) + 1


def test_ids_are_compared_character_by_character(built):
    service, _ = built
    ids = [in_form("clé", form) for form in CANONICAL]
    service.put_items({"items": [{"item_id": one, "title": "copper"} for one in ids]})
    for one in ids:
        assert slate(service, filter={"eq": ["item_id", one]})[0] == [one]
