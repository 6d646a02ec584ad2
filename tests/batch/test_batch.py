"""A batch job: parts, manifest and refused rows, with a stand-in for the model."""

import json

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.batch.generate import ANSWERS, Defaults, Generator
from recserve.batch.job import Job, check, run
from recserve.batch.together import together
from recserve.features.history.history import StoreUnavailable
from recserve.features.tables.parquet import SchemaError
from recserve.schemas.items import (
    InvalidRequest,
    RecommendedItem,
    RecommendRequest,
    RecommendResponse,
    TimingMs,
    UserRef,
)
from recserve.service import Service
from tests.support.in_process import InProcess
from tests.support.tiny_bundle import shared_bundle


def recommend(bodies, degraded=()):
    """Item "<user>-<rank>", k of them; a user called "bad" is refused."""
    results = []
    for body in bodies:
        if body.user.id == "bad":
            results.append(InvalidRequest("strategy", "is not there"))
            continue
        items = [
            RecommendedItem(
                item_id=f"{body.user.id}-{rank}", score=-rank / 3, rank=rank, source="model"
            )
            for rank in range(1, body.k + 1)
        ]
        answer = RecommendResponse(
            request_id="r",
            strategy=body.strategy,
            exact=True,
            rounds=1,
            model_version="m1",
            catalog_version="c1",
            degraded=list(degraded),
            attribution_token="",
            timing_ms=TimingMs(),
            items=items,
        )
        results.append(answer)
    return results


def write(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def read(folder):
    """All answer parts, one after another, with the schema each file says itself."""
    tables = [pq.ParquetFile(path).read() for path in sorted(folder.glob("part-*.parquet"))]
    return pa.concat_tables(tables)


def manifest(folder):
    lines = (folder / "_manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_parts_hold_every_user_in_order(tmp_path):
    """7 users, 3 per part: parts of 3, 3 and 1 users, 2 items each."""
    users = [f"u{i}" for i in range(7)]
    source = write(tmp_path / "in.parquet", user_id=users)
    seen = []
    job = Job(source, tmp_path / "out", rows_per_part=3)
    report = run(job, InProcess(Generator(recommend, Defaults(k=2), in_flight=2)), seen.append)
    table = read(tmp_path / "out")
    assert (tmp_path / "out" / "_SUCCESS").read_bytes() == b""
    assert table.schema.equals(ANSWERS)
    assert table["user_id"].to_pylist() == [u for u in users for _ in range(2)]
    assert table["rank"].to_pylist() == [1, 2] * 7
    assert table["item_id"].to_pylist()[:2] == ["u0-1", "u0-2"]
    assert set(table["model_version"].to_pylist()) == {"m1"}
    assert [part.users for part in report.parts] == [3, 3, 1]
    assert (report.users, report.rows, report.errors) == (7, 14, 0)
    assert [p.done for p in seen] == [2, 3, 5, 6, 7]
    assert {p.total for p in seen} == {7}


def test_bad_rows_go_to_errors_with_their_row(tmp_path):
    source = write(
        tmp_path / "in.parquet",
        user_id=["a", None, "c", "bad", "e", ""],
        k=[1, 1, 0, 1, None, 1],
        history=[["x"], None, None, None, ["x", None], None],
    )
    job = Job(source, tmp_path / "out")
    report = run(job, InProcess(Generator(recommend, Defaults(k=2), in_flight=4)))
    assert read(tmp_path / "out")["user_id"].to_pylist() == ["a"]
    assert report.errors == 5
    errors = pq.read_table(tmp_path / "out" / "_errors" / "part-00000.parquet").to_pylist()
    assert [(error["row"], error["user_id"]) for error in errors] == [
        (1, None),
        (2, "c"),
        (3, "bad"),
        (4, "e"),
        (5, ""),
    ]
    assert "user_id" in errors[0]["reason"]
    assert errors[1]["reason"] == "k: expected int >= 1, got 0"
    assert errors[2]["reason"] == "strategy: is not there"
    assert errors[3]["reason"] == "history[1]: expected string or integer, got null"


def test_row_values_override_the_defaults():
    asked = []

    def remember(bodies):
        asked.extend(bodies)
        return recommend(bodies)

    users = pa.table(
        {
            "user_id": ["a", "b"],
            "history": [["x", "y"], None],
            "k": pa.array([3, None], pa.int16()),
            "strategy": ["beam", None],
            "exclude_seen": [False, None],
        }
    )
    Generator(remember, Defaults(k=7, strategy="auto", beam_width=20))(users)
    first, second = asked
    assert (first.k, first.strategy, first.exclude.seen) == (3, "beam", False)
    assert (second.k, second.strategy, second.exclude.seen) == (7, "auto", True)
    assert (first.history, second.history) == (["x", "y"], None)
    assert first.beam_width == second.beam_width == 20


@pytest.mark.parametrize("column", ["filter", "diversity"])
def test_json_columns_reject_a_bad_row_alone(column):
    asked = []

    def remember(bodies):
        asked.extend(bodies)
        return recommend(bodies)

    first = {"filter": '{"eq": ["category", "x"]}', "diversity": '{"category": 2}'}[column]
    filters = [first, None, "{", "[1]", "[" * 70_000, "[" * 60_000]
    users = pa.table({"user_id": list("abcdef"), column: filters})
    errors = Generator(remember, Defaults(k=1))(users).errors.to_pylist()
    found = [getattr(body, column) for body in asked]
    assert msgspec.to_builtins(found[0]).items() >= json.loads(first).items() and found[1] is None
    assert [error["row"] for error in errors] == [2, 3, 4, 5]
    assert f"{column}: expected JSON, got '{{'" in errors[0]["reason"]
    assert errors[1]["reason"].startswith(f"{column}: expected ")
    assert "at most 65536 characters, got a string of length 70000" in errors[2]["reason"]
    assert errors[3]["reason"].startswith(f"{column}: ")


def test_the_output_may_not_lie_in_the_input(tmp_path):
    write(tmp_path / "in.parquet", user_id=["a"])
    for output in (tmp_path, tmp_path / "out"):
        with pytest.raises(ValueError, match="inside the input"):
            check(Job(tmp_path, output))


def test_a_store_that_is_down_ends_the_job(tmp_path):
    """Popular slates for everybody are not what was asked for."""
    source = write(tmp_path / "in.parquet", user_id=["a"])

    def without_store(bodies):
        return recommend(bodies, ["history_unavailable", "cold_start"])

    with pytest.raises(StoreUnavailable):
        run(Job(source, tmp_path / "out"), InProcess(Generator(without_store, Defaults())))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["_job.json"]


def test_a_damaged_history_refuses_its_row(tmp_path):
    source = write(tmp_path / "in.parquet", user_id=["a", "b"])

    def damaged(bodies):
        first, *rest = bodies
        return [*recommend([first], ["history_damaged"]), *recommend(rest)]

    report = run(Job(source, tmp_path / "out"), InProcess(Generator(damaged, Defaults())))
    assert report.errors == 1
    assert set(read(tmp_path / "out")["user_id"].to_pylist()) == {"b"}


def test_a_finished_job_is_not_computed_again_unless_told(tmp_path):
    source = write(tmp_path / "in.parquet", user_id=["a"])
    output = tmp_path / "out"
    asked = []

    def counted(bodies):
        asked.extend(bodies)
        return recommend(bodies)

    runner = InProcess(Generator(counted, Defaults(k=1)))
    first = run(Job(source, output), runner)
    (output / "mine.txt").write_text("x")
    again = run(Job(source, output), runner)
    assert again.parts == first.parts and (again.resumed, len(asked)) == (1, 1)
    assert (output / "mine.txt").exists()
    run(Job(source, output, overwrite=True), runner)
    assert len(asked) == 2
    assert sorted(p.name for p in output.iterdir()) == [
        "_SUCCESS",
        "_job.json",
        "_manifest.jsonl",
        "mine.txt",
        "part-00000.parquet",
    ]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"user": ["a"]}, ["user_id", "missing"]),
        ({"user_id": [True]}, ["user_id", "bool", "string or integer"]),
        ({"user_id": ["a"], "history": ["x"]}, ["history", "list<string>"]),
        ({"user_id": ["a"], "history": [[True]]}, ["history", "list<string> or list<integer>"]),
        ({"user_id": ["a"], "k": ["1"]}, ["k", "string", "an integer"]),
        ({"user_id": ["a"], "exclude_seen": ["yes"]}, ["exclude_seen", "bool"]),
        ({"user_id": ["a"], "filter": [1]}, ["filter", "string"]),
        ({"user_id": pa.array([], pa.string())}, ["no rows"]),
    ],
)
def test_a_wrong_schema_names_file_and_column(tmp_path, columns, words):
    source = write(tmp_path / "users.parquet", **columns)
    with pytest.raises(SchemaError) as error:
        check(Job(source, tmp_path / "out"))
    for word in ["users.parquet", *words]:
        assert word in str(error.value)


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "in.parquet").write_text("user_id\na\n")
    with pytest.raises(SchemaError, match="not a readable Parquet file"):
        check(Job(tmp_path / "in.parquet", tmp_path / "out"))
    (tmp_path / "in.jsonl").write_text('{"user_id": "a"}\n')
    with pytest.raises(SchemaError, match=r"in.jsonl: users come as Parquet .* for --llm"):
        check(Job(tmp_path / "in.jsonl", tmp_path / "out"))
    with pytest.raises(SchemaError, match="no such file"):
        check(Job(tmp_path / "none.parquet", tmp_path / "out"))


def test_groups_of_the_real_service_repeat_to_the_last_bit(tmp_path):
    """150 requests in groups of 50, twice: equal scores, not close ones; a wrong one is refused."""
    bodies = [
        RecommendRequest(history=[f"item{(7 * i + j) % 500:06d}" for j in range(1 + i % 12)], k=5)
        for i in range(150)
    ]
    bodies[70] = RecommendRequest(user=UserRef(id="user000001"), strategy="no such thing")
    runs = []
    for name in ("one", "two"):
        with Service.open(shared_bundle(), f"lmdb:{tmp_path / name}", "cpu") as service:
            recommend = together(service)
            answers = [a for start in (0, 50, 100) for a in recommend(bodies[start : start + 50])]
        assert isinstance(answers[70], InvalidRequest)
        kept = [a for i, a in enumerate(answers) if i != 70]
        runs.append([[(item.item_id, item.score) for item in a.items] for a in kept])
    assert runs[0] == runs[1]
    assert {len(slate) for slate in runs[0]} == {5}
