"""Data sets in their published forms."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.load.datasets import (
    Sample,
    UserOptions,
    read_samples,
)

SHARE_GPT = [
    {
        "id": "x1",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}],
    }
]
ROWS = [
    (
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Again."]},
        Sample("81", "writing", ("Compose a post.", "Again.")),
    ),
    (
        {
            "question_id": "q1",
            "category": "coding",
            "sub_category": "python",
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Sort this."},
            ],
        },
        Sample("q1", "coding", ("Sort this.",)),
    ),
    ({"question": "2 + 2?", "answer": "#### 4"}, Sample("0", "", ("2 + 2?",))),
    (
        {"problem": "Find x.", "unique_id": "test/1.json", "subject": "Algebra"},
        Sample("test/1.json", "Algebra", ("Find x.",)),
    ),
    (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "..."},
        Sample("HumanEval/0", "", ("def f():\n",)),
    ),
    (
        {"task_id": 11, "text": "Write a function.", "code": "x"},
        Sample("11", "", ("Write a function.",)),
    ),
    (
        {"prompt_id": 5, "category": "math", "prompt": ["One.", "Two."]},
        Sample("5", "math", ("One.", "Two.")),
    ),
]


@pytest.mark.parametrize(("row", "sample"), ROWS)
def test_prompts_are_read_from_json_lines(tmp_path, row, sample):
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    first, second = read_samples(path)
    assert first == sample
    assert second.turns == sample.turns


def test_speed_bench_is_read_from_parquet(tmp_path):
    path = tmp_path / "qualitative.parquet"
    rows = [{"question_id": "a", "category": "qa", "turns": ["One?", "Two?"], "src_id": "s"}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert read_samples(path) == [Sample("a", "qa", ("One?", "Two?"))]


def test_share_gpt_is_read_from_json(tmp_path):
    path = tmp_path / "share.json"
    path.write_text(json.dumps(SHARE_GPT))
    assert read_samples(path) == [Sample("x1", "", ("Hi",))]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"nothing": 1}',
        '{"turns": []}',
        '{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}',
        "not json",
    ],
)
def test_files_without_prompts_are_refused(tmp_path, text):
    path = tmp_path / "question.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="question.jsonl"):
        read_samples(path)


def events(path, **columns):
    pq.write_table(pa.table(columns), path)


def test_users_are_read_with_history_and_next_item(tmp_path):
    events(
        tmp_path / "events.parquet",
        user_id=["b", "a", "b", "b", "c"],
        item_id=["i2", "i9", "i1", "i3", "i4"],
        position=[1, 0, 0, 2, 0],
    )
    samples = read_samples(tmp_path, UserOptions(max_history=50))
    assert samples == [Sample("b", history=("i1", "i2"), next_item="i3")]
    whole = read_samples(tmp_path, UserOptions(max_history=2, hold_out=False))
    assert [(one.unit, one.history) for one in whole] == [
        ("a", ("i9",)),
        ("b", ("i2", "i3")),
        ("c", ("i4",)),
    ]


def test_users_may_be_sent_by_id_only_and_with_candidates(tmp_path):
    path = tmp_path / "users.parquet"
    events(path, user_id=["a", "a", "b", "b"], item_id=[1, 2, 1, 3])
    samples = read_samples(path, UserOptions(max_history=0, num_candidates=2))
    assert [one.history for one in samples] == [(), ()]
    assert all(len(set(one.candidates)) == 2 for one in samples)
    assert all(set(one.candidates) <= {"1", "2", "3"} for one in samples)
