"""Text jobs: OpenAI's batch lines and prompts in Parquet, on a small language model."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recserve.batch.job import Job, check, run
from recserve.batch.lines import LineTask
from recserve.batch.processes import LocalWorkers
from recserve.batch.prompt_columns import COMPLETIONS, check_prompts
from recserve.batch.prompts import PromptTask
from recserve.batch.recipe import TextRecipe
from recserve.batch.source import check_lines
from recserve.features.tables.parquet import SchemaError
from recserve.schemas.text import CompletionRequest
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.chat_templates import TEMPLATES
from tests.support.in_process import InProcess
from tests.support.paths import reference
from tests.support.recipe_here import here
from tests.support.tiny_llm import tiny_llm

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    settings = TextSettings(reference("stories260k"), dtype="float32", chat_template=template)
    with Service.of_text(load_text(settings, torch.device("cpu"))) as opened:
        yield opened


def line(number, url, **body):
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}


def requests():
    """Greedy, drawn, chat, rerank and scoring requests in turn."""
    lines = []
    for n in range(0, 25, 5):
        text = f"Once upon a time there were {n}"
        turns = [{"role": "user", "content": text}]
        lines += [
            line(n, "/v1/completions", prompt=text, max_tokens=6, temperature=0),
            line(n + 1, "/v1/completions", prompt="The cat", max_tokens=4 + n, logprobs=1, n=2),
            line(n + 2, "/v1/chat/completions", messages=turns, max_tokens=5),
            line(n + 3, "/v2/rerank", query="a cat", documents=["the cat", "a dog ran", "the cat"]),
            line(n + 4, "/generative_scoring", query="A", items=[" b", " c"], label_token_ids=[5]),
        ]
    return lines


def write_lines(path, lines):
    path.write_text(
        "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines)
    )
    return path


def outputs(folder, pattern="part-*.jsonl"):
    texts = [path.read_text() for path in sorted(folder.glob(pattern))]
    return [json.loads(each) for each in "".join(texts).splitlines()]


def compute(service, source, output, rows_per_part=10, **options):
    job = Job(source, output, rows_per_part, max_error_rate=1.0)
    return run(check(job, check_lines), InProcess(LineTask(service, in_flight=4, **options)))


def test_lines_are_answered_in_order_and_the_same_each_time(service, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", requests())
    report = compute(service, source, tmp_path / "one")
    assert (report.users, report.rows, report.errors, len(report.parts)) == (25, 25, 0, 3)
    compute(service, source, tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    found = outputs(tmp_path / "one")
    assert [each["custom_id"] for each in found] == [f"c{n}" for n in range(25)]
    assert {each["response"]["status_code"] for each in found} == {200}
    assert all(each["error"] is None for each in found)
    assert len({each["id"] for each in found}) == 25
    bodies = [each["response"]["body"] for each in found]
    assert len(bodies[1]["choices"]) == 2 and bodies[1]["created"] == 0
    assert "metrics" not in bodies[1] and "prompt_tokens_details" not in bodies[1]["usage"]
    assert bodies[2]["choices"][0]["message"]["role"] == "assistant"
    assert [each["index"] for each in bodies[3]["results"]] != []
    assert 0 <= bodies[4]["data"][0]["score"] <= 1


def test_a_line_gets_the_text_of_the_service(service, tmp_path):
    asked = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}
    source = write_lines(tmp_path / "in.jsonl", [line(0, "/v1/completions", **asked)])
    compute(service, source, tmp_path / "out")
    text = service.text.begin_completion(CompletionRequest(**asked)).wait().choices[0].text
    (found,) = outputs(tmp_path / "out")
    assert found["response"]["body"]["choices"][0]["text"] == text


def test_texts_without_a_seed_differ_by_line_and_by_the_seed_of_the_job(service, tmp_path):
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 1.5}
    source = write_lines(
        tmp_path / "in.jsonl", [line(n, "/v1/completions", **body) for n in (0, 1)]
    )
    texts = []
    for seed in (0, 1):
        compute(service, source, tmp_path / str(seed), seed=seed)
        found = outputs(tmp_path / str(seed))
        texts += [each["response"]["body"]["choices"][0]["text"] for each in found]
    assert len(set(texts)) == 4


def test_bad_lines_go_to_errors_as_http_responses(service, tmp_path):
    good = line(0, "/v1/completions", prompt="a", max_tokens=1)
    bad = [
        (line(1, "/v1/completions", prompt="a", max_tokens=-1), 400, "max_tokens"),
        ("not json\n", 400, None),
        (line(3, "/v1/recommend", k=3), 400, "url"),
        (line(4, "/v1/completions", prompt="a", model="other"), 404, None),
        (line(5, "/v1/completions", prompt="a", stream=True), 400, "stream"),
        (line(6, "/v1/completions", prompt="a " * 2000), 400, "prompt"),
        ({"custom_id": "c7", "body": {}}, 400, "url"),
        (
            line(8, "/v1/completions", prompt="a", speculation={"verifier": "rejection"}),
            400,
            "speculation.verifier",
        ),
    ]
    last = line(9, "/v1/completions", prompt="a", max_tokens=1)
    lines = [good, "\n", *(each for each, _, _ in bad), last]
    source = write_lines(tmp_path / "in.jsonl", lines)
    report = compute(service, source, tmp_path / "out", 100)
    assert (report.rows, report.errors) == (2, 8)
    found = outputs(tmp_path / "out" / "_errors")
    assert [each["line"] for each in found] == list(range(3, 11)), "from 1, with blank lines"
    assert [each["response"]["status_code"] for each in found] == [status for _, status, _ in bad]
    params = [each["response"]["body"]["error"]["param"] for each in found]
    assert params == [param for _, _, param in bad]
    assert [each["custom_id"] for each in found] == ["c1", None, *(f"c{n}" for n in range(3, 9))]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_byte_order_marks_before_lines_change_nothing(service, tmp_path, ends):
    """One begins a file, others the files that were joined to it; a blank line may have one."""
    lines = [json.dumps(line(n, "/v1/completions", prompt="a", max_tokens=2)) for n in range(4)]
    lines.insert(2, "")
    for name, marked in (("plain", ()), ("first", (0,)), ("joined", (0, 2, 3)), ("last", (4,))):
        texts = ["\ufeff" * (place in marked) + text for place, text in enumerate(lines)]
        source = tmp_path / f"{name}.jsonl"
        source.write_bytes("".join(text + ends for text in texts).encode())
        report = compute(service, source, tmp_path / name, 3)
        assert (report.rows, report.errors) == (4, 0)
        assert outputs(tmp_path / name) == outputs(tmp_path / "plain")


@pytest.mark.slow
def test_workers_write_the_bytes_of_one_process(tmp_path):
    source = write_lines(
        tmp_path / "in.jsonl", [each for each in requests() if "chat" not in each["url"]]
    )
    recipe = TextRecipe(str(reference("stories260k")), name="s", device="cpu", in_flight=4)
    with here(recipe) as alone:
        for count, runner in ((1, alone), (2, LocalWorkers(recipe, 2))):
            plan = check(Job(source, tmp_path / str(count), 8), check_lines)
            assert run(plan, runner).errors == 0
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes(), path.name


def prompts(service, source, output):
    job = check(Job(source, output, 3), check_prompts)
    return run(job, InProcess(PromptTask(service, in_flight=2)))


def test_prompts_of_parquet_become_completions(service, tmp_path):
    table = pa.table(
        {
            "custom_id": ["a", "b", None, "d"],
            "prompt": ["Once upon", "The cat", None, "A dog"],
            "max_tokens": [4, None, 2, 3],
            "temperature": [0.0, 0.0, 0.0, 3.0],
            "n": [2, None, None, None],
            "stop": [None, ["cat"], None, None],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    report = prompts(service, tmp_path / "in.parquet", tmp_path / "out")
    assert (report.rows, report.errors) == (3, 2)
    parts = sorted((tmp_path / "out").glob("part-*.parquet"))
    found = pa.concat_tables([pq.ParquetFile(path).read() for path in parts])
    assert found.schema.equals(COMPLETIONS)
    rows = found.to_pylist()
    assert [(row["row"], row["custom_id"], row["index"]) for row in rows] == [
        (0, "a", 0),
        (0, "a", 1),
        (1, "b", 0),
    ]
    errors = [
        row
        for path in sorted((tmp_path / "out" / "_errors").iterdir())
        for row in pq.read_table(path).to_pylist()
    ]
    assert [(error["row"], error["custom_id"]) for error in errors] == [(2, None), (3, "d")]
    assert errors[0]["reason"].startswith("prompt") and "temperature" in errors[1]["reason"]


def test_conversations_of_parquet_become_answers(service, tmp_path):
    turns = [[{"role": "user", "content": "Hello"}], [{"role": "", "content": "x"}]]
    pq.write_table(pa.table({"messages": turns, "max_tokens": [3, 3]}), tmp_path / "in.parquet")
    report = prompts(service, tmp_path / "in.parquet", tmp_path / "out")
    assert (report.rows, report.errors) == (1, 1)
    (row,) = pq.ParquetFile(tmp_path / "out" / "part-00000.parquet").read().to_pylist()
    assert row["completion_tokens"] == 3 and row["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": ["a"]}, "column prompt or a column messages"),
        ({"prompt": [1]}, "int64"),
        ({"messages": [["a"]]}, "list<struct"),
        ({"prompt": ["a"], "max_tokens": ["1"]}, "max_tokens"),
    ],
)
def test_columns_of_prompts_are_checked(tmp_path, columns, words):
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    with pytest.raises(SchemaError, match=words):
        check(Job(tmp_path / "in.parquet", tmp_path / "out"), check_prompts)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("as_lines", [True, False])
def test_a_repeated_custom_id_is_refused(tmp_path, as_lines, seed):
    """It names both places, in one file or two; a request without an id is never refused."""
    draw = random.Random(seed)
    pool = [None, *(f"{letter}-{n}" for n in range(6) for letter in "aß日")]
    seen, expected = {}, None
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        path = tmp_path / "in" / (name + (".jsonl" if as_lines else ".parquet"))
        ids = draw.choices(pool, k=draw.randint(1, 5))
        for row, one in enumerate(ids):
            place = f"{path}: {f'line {2 * row + 1}' if as_lines else f'row {row}'}"
            if one in seen and expected is None:
                expected = f"{place}: custom_id {one!r} is that of {seen[one]};"
            if one is not None:
                seen.setdefault(one, place)
        if as_lines:  # with blank lines between
            lines = ["{" if one is None else json.dumps({"custom_id": one}) for one in ids]
            path.write_text("\n\n".join(lines))
        else:
            table = pa.table({"custom_id": pa.array(ids, pa.string()), "prompt": ["a"] * len(ids)})
            pq.write_table(table, path)
    job = Job(tmp_path / "in", tmp_path / "out")
    try:
        check(job, check_lines if as_lines else check_prompts)
    except SchemaError as error:
        assert expected is not None and str(error).startswith(expected)
    else:
        assert expected is None


def test_lines_may_call_tools(tmp_path):
    """The ids of calls are functions of the line, too."""
    pytest.importorskip("llguidance")
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["hermes"])
    tool = {"type": "function", "function": {"name": "now"}}
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [tool], "max_tokens": 99}
    body |= {"tool_choice": {"type": "function", "function": {"name": "now"}}}
    lines = [line(n, "/v1/chat/completions", **body) for n in (0, 1)]
    lines.append(line(2, "/v1/chat/completions", **{**body, "tools": []}))
    source = write_lines(tmp_path / "in.jsonl", lines)
    settings = TextSettings(tiny_llm(tmp_path / "toy"), chat_template=template)
    with Service.of_text(load_text(settings, torch.device("cpu"))) as service:
        for name in ("one", "two"):
            compute(service, source, tmp_path / name)
    assert outputs(tmp_path / "one") == outputs(tmp_path / "two")
    first, second = [one["response"]["body"]["choices"][0] for one in outputs(tmp_path / "one")]
    calls = [choice["message"]["tool_calls"][0] for choice in (first, second)]
    assert [call["function"] for call in calls] == [{"name": "now", "arguments": "{}"}] * 2
    assert first["finish_reason"] == "tool_calls" and calls[0]["id"] != calls[1]["id"]
    (refused,) = outputs(tmp_path / "one" / "_errors")
    assert "tool_choice: needs tools" in json.dumps(refused)
