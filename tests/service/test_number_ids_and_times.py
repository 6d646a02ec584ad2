"""Numbers in the place of ids and times: each door reads them alike, or refuses them alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recserve.batch.generate import Defaults, Generator, check_schema
from recserve.batch.together import together
from recserve.bounds import format_time
from recserve.bundle.building import BuildOptions, build_bundle
from recserve.client import Client
from recserve.features.tables.event_table import read_events
from recserve.features.tables.items import read_items
from recserve.features.tables.parquet import BadRowError, SchemaError
from recserve.schemas.items import InvalidRequest
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import with_models

NUM_ITEMS = 60
USER = 77_000_003  # one of the bundle
US = 10**6


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose files have integer ids and times in seconds."""
    folder = tmp_path_factory.mktemp("numbers")
    rng = np.random.default_rng(3)
    pq.write_table(pa.table({"item_id": list(range(NUM_ITEMS))}), folder / "items.parquet")
    users = np.repeat(USER + np.arange(20), 6)
    events = {
        "user_id": users,
        "item_id": rng.integers(0, NUM_ITEMS, users.size),
        "timestamp": 1_700_000_000 + np.arange(users.size),
    }
    pq.write_table(pa.table(events), folder / "events.parquet")
    rows = rng.standard_normal((NUM_ITEMS, 16)).astype(np.float32)
    np.save(folder / "vectors.npy", rows)
    build_bundle(
        BuildOptions(
            folder / "items.parquet",
            folder / "events.parquet",
            folder / "bundle",
            embeddings=folder / "vectors.npy",
            levels=2,
            codes=16,
            collaborative_dim=0,
        ),
        log=lambda _: None,
    )
    return with_models(folder / "bundle")


@pytest.fixture(scope="module")
def service(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = f"lmdb:{tmp_path_factory.mktemp('store') / 'history'}"
    with Service.open(bundle, store=store, device="cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with live(service) as running:
        yield running


def id_of(value: Any) -> str | None:
    """What an id stands for, as the reference says: digits of whole numbers; None if refused."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not math.isfinite(value) or value != int(value):
        return None
    if isinstance(value, float) and abs(value) > 2.0**53:
        return None
    digits = str(int(value))
    return digits if len(digits) <= 256 else None


IDS = st.one_of(
    st.integers(0, 10**6),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(10**25, 10**30),
    st.sampled_from([2**53, 2**53 + 1, 2**63, 2**64, 10**256 - 1, 10**256, 10**300]),
    st.booleans(),
    st.floats(),
    st.integers(-(2**54), 2**54).map(float),
    st.decimals(allow_nan=False, allow_infinity=False, places=2),
    st.integers(-(10**30), 10**30).map(Decimal),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from(["007", "7.0", "1e3", "true"]),
)
EXAMPLES = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
REFUSED = (InvalidRequest, SchemaError, BadRowError)


def table_of(column: str, value: Any, **others: Any) -> pa.Table | None:
    """Returns a table of one row; None if no column can hold the value."""
    try:
        return pa.table({column: pa.array([value]), **others})
    except (OverflowError, pa.ArrowException):
        return None


def written(value: Any) -> str:
    """A JSON text of a value; Python's JSON knows no decimals."""
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def read_id(folder: Path, value: Any, column: str) -> str | None:
    """Returns an id from a file of events or items; None if the file is refused."""
    others = {} if column == "item_id" else {"item_id": ["7"], "position": [1]}
    table = table_of(column, value, **others)
    if table is None:
        return id_of(value)
    path = folder / "rows.parquet"
    pq.write_table(table, path)
    try:
        if column == "item_id":
            return str(read_items(path)[0].ids[0])
        items = read_items_of_seven(folder)
        return str(read_events(path, items)[0].user_ids[0])
    except (SchemaError, BadRowError):
        return None


@given(values=st.lists(st.integers(-(10**300), 10**300) | st.integers(), min_size=1, max_size=4))
@EXAMPLES
def test_lines_of_json_have_ids_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, values: list[int]
) -> None:
    """Their digits count, as over HTTP; another column refuses a number beyond 64 bits by line."""
    folder = tmp_path_factory.mktemp("lines")
    ids = list(dict.fromkeys(value for value in values if len(str(value)) <= 256)) or [2**64]
    path = folder / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps({"item_id": one}) for one in ids))
    assert list(read_items(path)[0].ids) == list(map(str, ids))
    row = {"item_id": 7, "position": 1}
    path.write_text("\n".join(json.dumps({**row, "user_id": one}) for one in ids))
    assert sorted(read_events(path, read_items_of_seven(folder))[0].user_ids) == sorted(
        map(str, ids)
    )
    wide = next((n for n, value in enumerate(values) if not -(2**63) <= value < 2**63), None)
    lines = [{"item_id": n, "price": [value]} for n, value in enumerate(values)]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    if wide is None:
        read_items(path)
        return
    with pytest.raises(SchemaError, match=f"column price, line {2 * wide + 1}: .* 64 bits"):
        read_items(path)


def read_items_of_seven(folder: Path) -> Any:
    path = folder / "seven.parquet"
    pq.write_table(pa.table({"item_id": [7]}), path)
    return read_items(path)[0]


@given(value=IDS)
@EXAMPLES
def test_files_read_ids_as_the_reference_says(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("file")
    assert read_id(folder, value, "user_id") == id_of(value)
    assert read_id(folder, value, "item_id") == id_of(value)


@given(value=IDS)
@EXAMPLES
def test_a_user_arrives_alike_through_every_door(
    service: Service, client: httpx.Client, value: Any
) -> None:
    """An event that came in through one door is read and deleted through the others."""
    expected = id_of(value)
    event = {"user_id": value, "item_id": 7}
    if expected is None:
        for call in (
            lambda: service.add_events({"events": [event]}),
            lambda: service.recommend({"user": value, "k": 1}),
            lambda: service.recommend({"user": {"id": value}, "k": 1}),
            lambda: service.history(value),
            lambda: service.delete_user(value),
        ):
            with pytest.raises(InvalidRequest, match="id"):
                call()
        if isinstance(value, float) and not math.isfinite(value):
            return  # JSON has no such number
        text = written(value)
        for path, body in (
            ("/v1/events", f'{{"events": [{{"user_id": {text}, "item_id": 7}}]}}'),
            ("/v1/recommend", f'{{"user": {{"id": {text}}}, "k": 1}}'),
        ):
            answer = client.post(path, content=body)
            assert answer.status_code == 422, answer.text
            bound = " of at most 256 digits" if type(value) is int else ""
            assert f"expected string or integer{bound}, got" in answer.json()["error"]["message"]
        return
    assert service.add_events({"events": [event]}).accepted == 1
    assert [e.item_id for e in service.history(value).events] == ["7"]
    text = written(value)
    body = f'{{"events": [{{"user_id": {text}, "item_id": 7}}]}}'
    assert client.post("/v1/events", content=body).json()["accepted"] == 1
    assert len(service.history(expected).events) == 2
    slate = client.post("/v1/recommend", content=f'{{"user": {{"id": {text}}}, "k": 60}}').json()
    same = service.recommend({"user": value, "k": 60})
    assert [i["item_id"] for i in slate["items"]] == [i.item_id for i in same.items]
    assert "7" not in {i.item_id for i in same.items}
    service.delete_user(value)
    assert service.history(expected).events == []


@given(values=st.lists(IDS, min_size=1, max_size=3))
@EXAMPLES
def test_a_batch_reads_ids_row_by_row(service: Service, values: list[Any]) -> None:
    for value in values:
        table = table_of("user_id", value)
        if table is None:
            continue
        if isinstance(value, bool):
            with pytest.raises(SchemaError, match="expected string or integer"):
                check_schema(table.schema, Path("users.parquet"))
            continue
        check_schema(table.schema, Path("users.parquet"))
        made = Generator(together(service), Defaults(k=3))(table)
        expected = id_of(value)
        assert set(made.answers["user_id"].to_pylist()) == ({expected} if expected else set())
        assert made.errors.num_rows == (expected is None)


def test_a_column_of_integers_with_a_gap_is_one_of_floats(service: Service) -> None:
    """As pandas writes it. The history in the row replaces the stored one."""
    table = pa.table(
        {
            "user_id": pa.array([3.0, math.nan, 7.5]),
            "history": pa.array([[1, 2], [3], None], pa.list_(pa.int32())),
        }
    )
    check_schema(table.schema, Path("users.parquet"))
    made = Generator(together(service), Defaults(k=NUM_ITEMS))(table)
    assert set(made.answers["user_id"].to_pylist()) == {"3"}
    assert not {"1", "2"} & set(made.answers["item_id"].to_pylist())
    reasons = made.errors["reason"].to_pylist()
    assert made.errors["user_id"].to_pylist() == [None, "7.5"]
    assert reasons == ["user_id: is null", "user.id: expected string or integer, got 7.5"]


@given(value=st.one_of(st.integers(0, NUM_ITEMS - 1), st.integers(0, NUM_ITEMS - 1).map(float)))
@EXAMPLES
def test_items_are_named_by_numbers_everywhere(
    service: Service, client: httpx.Client, value: Any
) -> None:
    item = str(int(value))
    body = {"history": [value, 3], "k": NUM_ITEMS, "exclude": {"item_ids": [value], "seen": False}}
    texts = {"history": [item, "3"], "k": NUM_ITEMS, "exclude": {"item_ids": [item], "seen": False}}
    there = [i["item_id"] for i in client.post("/v1/recommend", json=body).json()["items"]]
    assert there == [i.item_id for i in service.recommend(texts).items]
    assert item not in there
    ranks = {"history": [3], "candidates": [{"item_id": value}, {"item_id": 5}]}
    ranked = client.post("/v1/rank", json=ranks).json()
    assert {i["item_id"] for i in ranked["items"]} == {item, "5"}
    short = service.rank({"history": np.array([3]), "candidates": [value, 5]})
    assert [i.item_id for i in short.items] == [i["item_id"] for i in ranked["items"]]
    assert service.item(value).item_id == item
    assert client.put("/v1/items", json={"items": [{"item_id": value}]}).json()["updated"] == 1


def test_the_client_names_ids_by_numbers(service: Service, client: httpx.Client) -> None:
    with Client(str(client.base_url)) as ours:
        service.add_events({"events": [{"user_id": 4711, "item_id": 9, "event_id": 5}]})
        assert ours.history(4711).user_id == "4711" and ours.item(7.0).item_id == "7"
        again = {"user_id": 4711, "item_id": 9, "event_id": "5"}
        assert service.add_events({"events": [again]}).duplicates == 1
        ours.delete_user(4711)
        with pytest.raises(InvalidRequest, match="expected string or integer, got True"):
            ours.history(True)


SECONDS = st.integers(10**8, 1_780_000_000)
LEAPS = st.builds(
    lambda day, fraction, t: f"{day}{t}23:59:60{fraction}{'z' if t == 't' else 'Z'}",
    st.sampled_from(["1972-06-30", "2016-12-31", "2024-02-29"]),
    st.sampled_from(["", ".5", ".000001", ".123456"]),
    st.sampled_from("Tt"),
) | st.sampled_from(
    ["2017-01-01T00:59:60+01:00", "2016-12-31T15:59:60.25-08:00", "2017-01-01t05:29:60+05:30"]
)
TIMES = st.one_of(
    SECONDS,
    SECONDS.flatmap(lambda s: st.sampled_from([s * 10**3, s * US + 1, s * 10**9 + 999])),
    st.floats(1e8, 1.78e9),
    st.floats(1e11, 1.78e12),
    st.floats(1e17, 1.78e18),
    SECONDS.map(str),
    SECONDS.map(lambda s: f"{s}.25"),
    st.sampled_from(["2024-02-29T23:30:00+02:00", "2025-01-01t00:00:00.5z"]),
    LEAPS,
)
NO_TIMES = st.one_of(
    st.integers(-(10**12), 10**8 - 1),
    st.integers(END := 2**53 // US, 10**11 - 1),
    st.integers(2**63, 2**70),
    st.booleans(),
    st.sampled_from([math.nan, math.inf, 0.5, "yesterday", "12", "2024-02-30T00:00:00Z"]),
    st.sampled_from(["2016-12-31T23:59:61Z", "2016-12-31T12:00:60Z", "2016-12-31T23:59:60+01:00"]),
)


def read_time(folder: Path, value: Any) -> int | None:
    """Returns the time of the only event of a file; None if the file is refused."""
    table = table_of("timestamp", value, user_id=["u"], item_id=["7"])
    if table is None:
        return None
    pq.write_table(table, folder / "events.parquet")
    try:
        return int(read_events(folder / "events.parquet", read_items_of_seven(folder))[0].times[0])
    except (SchemaError, BadRowError):
        return None


def write_lines(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def stored_time(service: Service, user: str) -> int:
    (event,) = service.histories.store.get(user)
    service.delete_user(user)
    return int(event["time_us"])


@given(value=TIMES)
@EXAMPLES
def test_a_time_arrives_alike_through_every_door(
    service: Service,
    client: httpx.Client,
    tmp_path_factory: pytest.TempPathFactory,
    value: Any,
) -> None:
    expected = read_time(tmp_path_factory.mktemp("file"), value)
    assert expected is not None
    event = {"user_id": "timed", "item_id": 7, "timestamp": value}
    assert service.add_events({"events": [event]}).accepted == 1
    assert stored_time(service, "timed") == expected
    assert client.post("/v1/events", json={"events": [event]}).json()["accepted"] == 1
    assert stored_time(service, "timed") == expected
    item = {"item_id": 7, "available_from": value}
    for name, form in (("items.parquet", pq.write_table), ("items.jsonl", write_lines)):
        path = tmp_path_factory.mktemp("items") / name
        form(table_of("available_from", value, item_id=["7"]), path)
        begins = read_items(path)[0].time("available_from").cast(pa.int64())
        assert begins.to_pylist() == [expected]
    for put in (
        lambda: service.put_items({"items": [item]}).rejected,
        lambda: client.put("/v1/items", json={"items": [item]}).json()["rejected"],
    ):
        assert put() == []
        assert service.item(7).available_from == format_time(expected)
    assert service.put_items({"items": [{**item, "available_from": None}]}).rejected == []
    shown = {"candidates": [{"item_id": 7, "shown_at": value}], "user": USER}
    assert client.post("/v1/rank", json={**shown, "user": {"id": str(USER)}}).status_code == 200
    assert len(service.rank(shown).items) == 1


@given(value=NO_TIMES)
@EXAMPLES
def test_what_is_no_time_is_refused_at_every_door(
    service: Service,
    client: httpx.Client,
    tmp_path_factory: pytest.TempPathFactory,
    value: Any,
) -> None:
    """Of several events, only the one with the wrong time is refused."""
    assert read_time(tmp_path_factory.mktemp("file"), value) is None
    events = [
        {"user_id": "untimed", "item_id": 7, "timestamp": value},
        {"user_id": "untimed", "item_id": 7, "timestamp": 1_700_000_000},
    ]
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        with pytest.raises(InvalidRequest, match="expected (string or number|RFC 3339)"):
            service.add_events({"events": events})
        return
    for send in (
        lambda: service.add_events({"events": events}),
        lambda: client.post("/v1/events", json={"events": events}).json(),
    ):
        answer = send()
        plain = (
            answer
            if isinstance(answer, dict)
            else {
                "rejected": [{"index": r.index, "reason": r.reason} for r in answer.rejected],
                "accepted": answer.accepted,
            }
        )
        assert [one["index"] for one in plain["rejected"]] == [0]
        assert plain["rejected"][0]["reason"].startswith("timestamp: expected RFC 3339")
        assert plain["accepted"] == 1
        service.delete_user("untimed")


@given(value=st.one_of(NO_TIMES, st.integers(10**60, 10**300), st.floats(1e20, 1e300)))
@EXAMPLES
def test_a_number_that_is_no_time_is_refused_as_a_number(client: httpx.Client, value: Any) -> None:
    """It is not said to be a wrong RFC 3339 text."""
    if isinstance(value, bool | str) or not math.isfinite(value):
        return
    shown = {"history": [7], "candidates": [{"item_id": 7, "shown_at": value}]}
    said = client.post("/v1/rank", json=shown).json()["error"]
    reasons = [said["message"].removeprefix(f"{said['param']}: ")]
    assert said["param"] == "candidates[0].shown_at"
    for name in ("available_from", "expires_at"):
        item = {"items": [{"item_id": 7, name: value}]}
        (refused,) = client.put("/v1/items", json=item).json()["rejected"]
        reasons.append(refused["reason"].removeprefix(f"{name}: "))
    numbers = "expected RFC 3339 with a zone, or a number since 1970 in seconds, milli"
    assert all(reason.startswith(numbers) for reason in reasons), reasons


def test_shown_at_counts_from_1970_in_any_unit(service: Service) -> None:
    """Equal moments in four units and as text give equal scores; an earlier one another."""

    def score(moment: Any) -> float:
        body = {"user": USER, "candidates": [{"item_id": 7, "shown_at": moment}]}
        return service.rank(body).items[0].score

    before, after = 1_700_000_002, 1_700_000_010
    same = [after, after * 10**3, after * US, after * 10**9, float(after), "2023-11-14T22:13:30Z"]
    assert len({score(moment) for moment in same}) == 1
    assert score(before) != score(after)


@given(ids=st.lists(st.integers(0, NUM_ITEMS - 1), min_size=1, max_size=5), data=st.data())
@EXAMPLES
def test_a_filter_reads_numbers_in_the_place_of_item_ids(
    service: Service, client: httpx.Client, ids: list[int], data: Any
) -> None:
    """Integers, whole floats and digits name the same items, and an unknown one gives a hint."""
    forms = [data.draw(st.sampled_from([number, float(number), str(number)])) for number in ids]
    tree = {"in": ["item_id", forms]} if len(forms) > 1 else {"eq": ["item_id", forms[0]]}
    body = {"strategy": "latest", "k": NUM_ITEMS, "filter": tree}
    for said in (
        client.post("/v1/recommend", json=body).json()["items"],
        [{"item_id": item.item_id} for item in service.recommend(body).items],
    ):
        assert {item["item_id"] for item in said} == {str(number) for number in ids}
    unknown = {**body, "filter": {"not": {"eq": ["item_id", NUM_ITEMS + 7]}}}
    hints = client.post("/v1/recommend", json=unknown).json()["filter_hints"]
    assert any(f'no item has "{NUM_ITEMS + 7}"' in hint for hint in hints)
    for wrong in (True, 7.5, None):
        tree = {"eq": ["item_id", wrong]}
        said = client.post("/v1/recommend", json={**body, "filter": tree})
        assert said.status_code == 422
