"""What `build` accepts, every later command accepts; what one door accepts, the others read."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve import bounds
from recserve.batch.generate import Defaults, Generator
from recserve.batch.together import together
from recserve.bundle.building import BuildOptions, build_bundle
from recserve.features.history.history import StoredEvent
from recserve.features.tables.parquet import BadRowError
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import with_models

NUM_ITEMS = 80
ALPHABETS = ("a", "é", "界", "😀")


def texts(most: int, number: int) -> list[str]:
    """Distinct texts whose length is around a bound, in characters of 1 to 4 bytes."""
    drawn = random.Random(most)
    return [
        f"{n:03d}".ljust(most + step, drawn.choice(ALPHABETS))
        for n, step in enumerate((-1, 0, 1) * number)
    ]


def users() -> list[str]:
    """Ids around the bound in characters, and around the bound in bytes."""
    found = texts(bounds.MAX_ID_LENGTH, 2)
    for n, letter in enumerate(ALPHABETS):
        size = len(letter.encode())
        number = (bounds.MAX_USER_ID_BYTES - 3) // size
        found += [f"{n}-{step % 9}" + letter * (number + step) for step in (-1, 0, 1)]
    return found


def fits_user(user: str) -> bool:
    return len(user) <= bounds.MAX_ID_LENGTH and len(user.encode()) <= bounds.MAX_USER_ID_BYTES


ODD_ITEMS: list[dict[str, Any]] = [
    *({"item_id": item} for item in texts(bounds.MAX_ID_LENGTH, 3)),
    *(
        {"item_id": f"title{n}", "title": text}
        for n, text in enumerate(texts(bounds.MAX_TITLE_LENGTH, 2))
    ),
    *(
        {"item_id": f"path{n}", "categories": ["x", text]}
        for n, text in enumerate(texts(bounds.MAX_CATEGORY_LENGTH, 2))
    ),
    *(
        {"item_id": f"paths{n}", "categories": [f"c{k}" for k in range(n)]}
        for n in (bounds.MAX_CATEGORIES - 1, bounds.MAX_CATEGORIES, bounds.MAX_CATEGORIES + 1)
    ),
]
TIMES = [
    *(bounds.MIN_TIME_US + step for step in (-1, 0, 1)),
    *(bounds.MAX_TIME_US + step for step in (-1, 0, 1)),
    *(-1_000_000, 0, 1_700_000_000_000_000_000, 2**63 - 1, -(2**63) + 1),
]


def fits_item(item: dict[str, Any]) -> bool:
    paths = item.get("categories", [])
    return (
        len(item["item_id"]) <= bounds.MAX_ID_LENGTH
        and len(item.get("title", "")) <= bounds.MAX_TITLE_LENGTH
        and len(paths) <= bounds.MAX_CATEGORIES
        and all(len(path) <= bounds.MAX_CATEGORY_LENGTH for path in paths)
    )


def write_files(folder: Path) -> None:
    plain = [
        {"item_id": f"i{n}", "title": f"Löffel {n % 7}", "categories": [f"Küche > {n % 5}"]}
        for n in range(NUM_ITEMS)
    ]
    items = [{"title": "", "categories": []} | item for item in [*plain, *ODD_ITEMS]]
    pq.write_table(pa.Table.from_pylist(items), folder / "items.parquet")
    events = [
        (user, f"i{(n + k) % NUM_ITEMS}", 1_700_000_000_000_000 + k * 10**6)
        for n, user in enumerate([*users(), *(f"plain{n}" for n in range(20))])
        for k in range(5)
    ]
    events += [("times", f"i{n}", time_us) for n, time_us in enumerate(sorted(TIMES))]
    events += [("odd items", item["item_id"], 1_700_000_000_000_000) for item in ODD_ITEMS]
    user_ids, item_ids, times = zip(*events, strict=True)
    clock = pa.array(times, pa.timestamp("us"))
    table = pa.table({"user_id": user_ids, "item_id": item_ids, "timestamp": clock})
    pq.write_table(table, folder / "events.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounds")
    write_files(folder)
    files = (folder / "items.parquet", folder / "events.parquet", folder / "bundle")
    small = {"levels": 2, "codes": 16, "text_dim": 16, "collaborative_dim": 0}
    options = BuildOptions(*files, on_bad_rows="skip", **small)  # type: ignore[arg-type]
    report = build_bundle(options, log=lambda _: None)
    assert set(report.bad_items.dropped) == {
        "long item_id",
        "long title",
        "many categories",
        "long category",
    }
    assert set(report.bad_events.dropped) == {
        "long user_id",
        "unknown item_id",
        "timestamp out of range",
    }
    with_models(folder / "bundle")
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Any:
    with Service.open(folder / "bundle", f"lmdb:{folder}/users", "cpu") as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> Any:
    with live(service) as running:
        yield running


def answer(client: httpx.Client, method: str, path: str, body: Any = None) -> httpx.Response:
    return client.request(method, path, json=body)


def path_of(text: str) -> str:
    return quote(text, safe="").replace(".", "%2E")


def test_a_build_without_skip_names_every_reason(folder: Path) -> None:
    files = (folder / "items.parquet", folder / "events.parquet", folder / "other")
    with pytest.raises(BadRowError) as refused:
        build_bundle(BuildOptions(*files), log=lambda _: None)
    for reason in ("long item_id", "long title", "many categories", "long category"):
        assert reason in str(refused.value)


def test_a_batch_answers_for_every_imported_user(service: Service) -> None:
    there = [user for user in users() if fits_user(user)]
    job = Generator(together(service), Defaults(k=3))
    made = job(pa.table({"user_id": [*there, *(u for u in users() if not fits_user(u))]}))
    assert sorted(set(made.answers["user_id"].to_pylist())) == sorted(there)
    assert made.errors.num_rows == len(users()) - len(there)


@pytest.mark.parametrize("user", users(), ids=ascii)
def test_a_user_passes_every_door_or_none(client: httpx.Client, user: str) -> None:
    fits = fits_user(user)
    status = 200 if fits else 422
    asked = [{"user": {"id": user}, "k": 2}, {"user": {"id": user}, "history": ["i1"], "k": 2}]
    assert [answer(client, "POST", "/v1/recommend", body).status_code for body in asked] == [
        status,
        status,
    ]
    body = {"user": {"id": user}, "candidates": [{"item_id": "i1"}]}
    assert answer(client, "POST", "/v1/rank", body).status_code == status
    history = answer(client, "GET", f"/v1/users/{path_of(user)}/history")
    assert history.status_code == status
    event = {"user_id": user, "item_id": "i1"}
    said = answer(client, "POST", "/v1/events", {"events": [event]}).json()
    assert (said["accepted"], len(said["rejected"])) == ((1, 0) if fits else (0, 1))
    deleted = answer(client, "DELETE", f"/v1/users/{path_of(user)}")
    assert deleted.status_code == (204 if fits else 422)
    if fits:
        assert len(history.json()["events"]) == 5  # what the build imported
        gone = answer(client, "GET", f"/v1/users/{path_of(user)}/history").json()
        assert gone["events"] == []


@pytest.mark.parametrize("item", ODD_ITEMS, ids=lambda item: ascii(item["item_id"])[:12])
def test_an_item_passes_every_door_or_none(client: httpx.Client, item: dict[str, Any]) -> None:
    fits, name = fits_item(item), item["item_id"]
    found = answer(client, "GET", f"/v1/items/{path_of(name)}")
    assert found.status_code == (200 if fits else 404)
    said = answer(client, "PUT", "/v1/items", {"items": [item]}).json()
    assert (said["updated"], len(said["rejected"])) == ((1, 0) if fits else (0, 1))
    if not fits:
        return
    for body in (
        {"history": [name], "k": 2},
        {"history": ["i1"], "exclude": {"item_ids": [name]}, "k": 2},
        {"history": ["i1"], "filter": {"eq": ["item_id", name]}, "k": 2},
    ):
        slate = answer(client, "POST", "/v1/recommend", body)
        assert slate.status_code == 200
        assert "unknown_history_items" not in slate.json()["degraded"]
    body = {"history": ["i1"], "candidates": [{"item_id": name}]}
    ranked = answer(client, "POST", "/v1/rank", body)
    assert ranked.status_code == 200 and ranked.json()["missing_item_ids"] == []
    for path in item.get("categories", []):
        body = {"history": ["i1"], "filter": {"eq": ["category", path]}, "k": 2}
        assert answer(client, "POST", "/v1/recommend", body).status_code == 200
    assert answer(client, "DELETE", f"/v1/items/{path_of(name)}").status_code == 200


def test_times_at_the_bounds_are_read_again(client: httpx.Client) -> None:
    events = answer(client, "GET", "/v1/users/times/history").json()["events"]
    inside = sorted(t for t in TIMES if bounds.MIN_TIME_US <= t < bounds.MAX_TIME_US)
    assert [event["timestamp"] for event in events] == list(map(bounds.format_time, inside))
    for time_us in TIMES:
        if time_us <= bounds.MIN_TIME_US + 1 and time_us > -(10**12):
            for text in (bounds.format_time(time_us), bounds.format_time(time_us).lower()):
                event = {"user_id": text, "item_id": "i1", "timestamp": text}
                said = answer(client, "POST", "/v1/events", {"events": [event]}).json()
                assert said["accepted"] == (time_us >= bounds.MIN_TIME_US)
    stored = [t for t in TIMES if 0 <= t < bounds.MAX_TIME_US]
    assert [StoredEvent(1, time_us, 1).time_us for time_us in stored] == stored


def test_a_bundle_is_read_in_any_locale(folder: Path) -> None:
    """The words and categories of this bundle are not ASCII."""
    code = (
        "import locale, sys; assert locale.getencoding() != 'utf-8', locale.getencoding()\n"
        "from recserve.bundle.bundle import Bundle\n"
        "from recserve.features.ranking.ranking_tables import RankingTables\n"
        "bundle = Bundle.open(sys.argv[1])\n"
        "catalog, events, quantizer = bundle.catalog(), bundle.events(), bundle.quantizer()\n"
        "assert any(not term.isascii() for term in bundle.text_encoder().terms)\n"
        "RankingTables.load(bundle.directory('ranker'), catalog.items, catalog.vectors)\n"
    )
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-c", code, str(folder / "bundle")],
        env={**os.environ, **c_locale},
        check=True,
    )
