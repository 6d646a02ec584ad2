"""The commands over a tiny bundle: what they print, what they refuse, how they end."""

import json
import re
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.testing

from recserve.cli import app, main
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from tests.support.tiny_bundle import NUM_ITEMS, shared_bundle

COMMANDS = (
    *("demo", "build", "train", "evaluate", "serve", "recommend", "rank", "batch", "doctor"),
    *(
        "bundle verify",
        "bundle calibrate",
        "history show",
        "history delete",
        "history backup",
        "history restore",
        "history export",
    ),
    *("train recommender", "train drafter", "train lm", "train medusa"),
)


def run(*arguments):
    """Outcome of a command: exit_code, stdout, stderr, exception."""
    return typer.testing.CliRunner().invoke(app, [str(a) for a in arguments])


def answer(*arguments):
    """The JSON of a command that must succeed."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def bundle():
    return shared_bundle()


@pytest.fixture
def store(tmp_path):
    return f"lmdb:{tmp_path / 'history'}"


HEAVY = (
    *("torch", "numpy", "pyarrow", "faiss", "safetensors", "msgspec", "fastapi"),
    *("uvicorn", "sklearn", "scipy", "matplotlib", "tokenizers", "lmdb", "redis", "jinja2"),
)


def test_help_imports_nothing_heavy():
    """A help page that loads torch costs seconds; all of it takes under half a second."""
    pages = [[], ["train", "lm"], ["recommend"], ["serve"]]
    code = (
        "import sys\nfrom recserve.cli import main\n"
        f"for page in {pages!r}:\n"
        "    sys.argv = ['recserve', *page, '--help']\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code\n"
        f"    print('HEAVY', set({HEAVY!r}) & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("Usage") == done.stdout.count("HEAVY set()") == len(pages)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_version_is_printed():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("recserve 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv"], "serv"),
        (["build", "--items", "a"], "--events"),
        (["train", "gpt", "--bundle", "b"], "gpt"),
        (["train", "ranker", "--bundle", "b", "--epochs", "0"], "--epochs"),
        (["evaluate", "--bundle", "b", "--k", "5,x"], "5,x"),
        (["recommend", "--bundle", "b", "--filter", "{"], "JSON"),
        (["batch", "--bundle", "b", "--input", "i", "--output", "o", "--engine", "dask"], "dask"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_it(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_errors_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recserve", "bundle", "verify", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "manifest.json" in err
    assert err.count("\n") == 1


def test_serve_takes_a_language_model_and_its_drafters(monkeypatch):
    served = []
    monkeypatch.setattr("recserve.server.run.serve", lambda config: served.append(config) or 0)
    monkeypatch.setattr("recserve.config.ServerConfig.check_files", lambda config: None)
    flags = "--llm m --llm-name tiny --drafter ngram --drafter medusa=heads --chat-template c"
    assert run("serve", *flags.split()).exit_code == 0
    (config,) = served
    assert (config.bundle, config.llm.name, config.llm_name) == (None, "m", "tiny")
    assert config.drafters == ("ngram", "medusa=heads") and config.chat_template.name == "c"
    assert "llm" in str(run("serve", "--bundle", "b", "--drafter", "ngram").exception)


def test_debug_shows_the_trace_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recserve", "--debug", "bundle", "verify", str(tmp_path)])
    with pytest.raises(ValueError, match=r"manifest\.json"):
        main()


@pytest.mark.parametrize("debug", [False, True])
def test_a_missing_library_names_its_extra(debug, monkeypatch, capsys):
    def fail():
        raise ModuleNotFoundError("No module named 'sklearn.svm'", name="sklearn.svm")

    monkeypatch.setitem(main.__globals__, "app", fail)
    monkeypatch.setattr(sys, "argv", ["recserve", *["--debug"] * debug])
    with pytest.raises(ModuleNotFoundError if debug else SystemExit):
        main()
    said = capsys.readouterr().err
    assert debug or ("this command needs scikit-learn: " in said and "[train]" in said)


def test_recommend_gives_k_unseen_items(bundle, store):
    arguments = ["recommend", "--bundle", bundle, "--store", store, "--user", "user000001"]
    arguments += ["--strategy", "beam"]
    slate = answer(*arguments, "-k", 7)
    past = answer("history", "show", "user000001", "--bundle", bundle, "--store", store)
    items = [item["item_id"] for item in slate["items"]]
    assert len(items) == len(set(items)) == 7
    assert not set(items) & {event["item_id"] for event in past["events"]}
    assert [item["rank"] for item in slate["items"]] == list(range(1, 8))
    assert slate["strategy"] == "beam"
    assert slate["exact"] is True
    table = run(*arguments, "-k", 7).stdout
    assert all(item in table for item in items)
    assert " ms (queue " in table


def test_recommend_takes_a_history_and_a_filter(bundle, store):
    slate = answer(
        *("recommend", "--bundle", bundle, "--store", store, "-k", 5),
        *("--history", "item000001,item000002", "--history", "item000003"),
        *("--filter", '{"in": ["item_id", ["item000001", "item000009", "item000010"]]}'),
    )
    assert {item["item_id"] for item in slate["items"]} == {"item000009", "item000010"}
    assert "fewer_than_k" in slate["degraded"]


def test_rank_orders_the_items_and_names_the_missing(bundle, store):
    arguments = ["rank", "--bundle", bundle, "--store", store, "--user", "user000001"]
    arguments += ["--item", "item000004,item000005", "--item", "item000006", "--item", "nothing"]
    ranking = answer(*arguments)
    assert {i["item_id"] for i in ranking["items"]} == {"item000004", "item000005", "item000006"}
    scores = [item["score"] for item in ranking["items"]]
    assert scores == sorted(scores, reverse=True)
    assert ranking["missing_item_ids"] == ["nothing"]
    assert "not in the catalogue: nothing" in run(*arguments).stderr
    for others in ((*arguments, "--json"), arguments[:-2]):
        assert "not in the catalogue" not in run(*others).stderr
    assert answer(*arguments, "--scorer", "likelihood")["scorer"] == "likelihood"


def test_history_is_shown_and_deleted(bundle, store):
    place = ["--bundle", bundle, "--store", store]
    assert answer("history", "show", "user000002", *place)["events"]
    shown = run("history", "show", "user000002", *place).stdout
    assert "user000002" in shown and re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d ", shown)
    assert run("history", "delete", "user000002", *place).exit_code == 0
    assert answer("history", "show", "user000002", *place)["events"] == []
    assert answer("history", "show", "user000003", *place)["events"]


def test_verify_accepts_the_bundle_and_finds_a_changed_byte(bundle, tmp_path):
    assert "files match" in run("bundle", "verify", bundle).stdout
    copy = shutil.copytree(bundle, tmp_path / "copy")
    path = copy / "vectors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = run("bundle", "verify", copy)
    assert result.exit_code == 1
    assert "vectors.safetensors" in str(result.exception)


@pytest.mark.slow
def test_batch_writes_the_answers_of_recommend(bundle, store, tmp_path):
    """Two users of the store, one with a history of its own, one nobody knows, one refused."""
    source = tmp_path / "users.parquet"
    rows = {
        "user_id": ["user000001", "user000002", "guest", "nobody", "user000003"],
        "history": [None, None, ["item000001", "item000002"], None, None],
        "strategy": [None, None, None, None, "no such thing"],
    }
    pq.write_table(pa.table(rows), source)
    output = tmp_path / "out"
    result = run(
        *("batch", "--bundle", bundle, "--store", store, "--input", source),
        *("--output", output, "-k", 6, "--rows-per-part", 3, "--progress", "json"),
    )
    assert result.exit_code == 0, result.output
    assert "5 users, 24 rows in 2 parts, 1 refused (see _errors)" in result.stdout
    progress = [json.loads(line) for line in result.stderr.splitlines() if line[:1] == "{"]
    assert [line["done"] for line in progress] == [3, 5]
    assert progress[-1]["total"] == 5
    parts = [pq.ParquetFile(p).read() for p in sorted(output.glob("part-*.parquet"))]
    table = pa.concat_tables(parts).to_pylist()
    slate = answer(
        *("recommend", "--bundle", bundle, "--store", store, "--user", "user000002", "-k", 6)
    )
    mine = [row for row in table if row["user_id"] == "user000002"]
    assert [row["item_id"] for row in mine] == [item["item_id"] for item in slate["items"]]
    assert [row["score"] for row in mine] == pytest.approx(
        [item["score"] for item in slate["items"]], abs=1e-4
    )
    assert {row["strategy"] for row in table if row["user_id"] == "nobody"} == {"popular"}
    errors = pq.read_table(output / "_errors" / "part-00001.parquet").to_pylist()
    assert [(error["row"], error["user_id"]) for error in errors] == [(4, "user000003")]
    again = ("batch", "--bundle", bundle, "--store", store, "--input", source, "--output", output)
    other = run(*again, "-k", 5, "--rows-per-part", 3)
    assert other.exit_code == 2 and "k was 6 and is 5" in other.stderr


@pytest.mark.slow
def test_batch_called_wrongly_ends_with_2(bundle, store, tmp_path):
    source = tmp_path / "users.parquet"
    pq.write_table(pa.table({"user": ["a"]}), source)
    arguments = ["batch", "--bundle", bundle, "--store", store, "--output", tmp_path / "out"]
    result = run(*arguments, "--input", source)
    assert result.exit_code == 2
    assert "users.parquet" in result.stderr
    assert "user_id" in result.stderr
    pq.write_table(pa.table({"user_id": ["a"]}), source)
    assert run(*arguments, "--input", source, "-k", 0).exit_code == 2
    wrong = run(*arguments, "--input", source, "--strategy", "bean")
    assert wrong.exit_code == 2 and "strategy is 'bean'; expected one of auto, beam" in wrong.stderr
    assert run(*arguments, "--input", tmp_path / "none.parquet").exit_code == 2
    ignored = run(*arguments, "--input", source, "--llm-name", "x")
    assert ignored.exit_code == 2 and "--llm-name has no effect with --bundle" in ignored.stderr
    both = run(*arguments, "--input", source, "--llm", tmp_path)
    assert both.exit_code == 2 and "give either --bundle or --llm" in both.stderr


def test_build_train_and_evaluate(tmp_path):
    """From Parquet to figures: each command finds what the one before it made."""
    files = write_synthetic(tmp_path, SyntheticOptions(NUM_ITEMS, 60, 10))
    out = tmp_path / "bundle"
    built = run(
        *("build", "--items", files.items, "--events", files.events, "--out", out),
        *("--levels", 3, "--codes", 16),
    )
    assert built.exit_code == 0, built.output
    assert f"{NUM_ITEMS} items, 60 users" in built.stdout
    early = run("evaluate", "--bundle", out)
    assert early.exit_code == 1
    assert "no recommender was trained" in str(early.exception)
    trained = run("train", "sasrec", "--bundle", out, "--epochs", 1, "--device", "cpu")
    assert trained.exit_code == 0, trained.output
    assert "best epoch 1 of 1" in trained.stdout
    figures = tmp_path / "new" / "figures.json"
    done = run(
        *("evaluate", "--bundle", out, "--strategy", "sasrec", "--split", "valid"),
        *("--k", "1,20", "--json", figures),
    )
    assert done.exit_code == 0, done.output
    columns = json.loads(figures.read_text())["columns"]
    assert set(columns) == {"kept", "filtered"}
    assert columns["kept"]["recall@1"] <= columns["kept"]["recall@20"]
    beside = run(
        *("evaluate", "--bundle", out, "--strategy", "sasrec", "--split", "valid"),
        *("--k", "1,20", "--baselines", "--json", figures),
    )
    assert beside.exit_code == 0, beside.output
    assert "popularity" in beside.stdout
    found = json.loads(figures.read_text())
    assert found["columns"] == columns
    assert {"popularity", "item-kNN"} <= set(found["baselines"])
    low, high = found["intervals"]["kept"]["recall@20"]
    assert low <= columns["kept"]["recall@20"] <= high
    card = run(
        *("evaluate", "--bundle", out, "--strategy", "sasrec", "--k", "1,20", "--card"),
        *("--json", figures, "--plot", tmp_path / "new" / "card.png"),
        *("--markdown", tmp_path / "new" / "card.md"),
    )
    assert card.exit_code == 0, card.output
    assert card.stdout.startswith("# Audit card\n") and "| item-kNN | filtered |" in card.stdout
    assert set(json.loads(figures.read_text())["rows"]) >= {"sasrec", "popularity", "item-kNN"}
    assert (tmp_path / "new" / "card.png").stat().st_size
    assert (tmp_path / "new" / "card.md").read_text() in card.stdout
    for flags, message in (
        (("--strategy", "all", "--baselines"), "--baselines needs one strategy"),
        (("--strategy", "all", "--card"), "--card needs one strategy"),
        (("--plot", "p.png"), "--plot has no effect without --card or --strategy all"),
        (("--markdown", "m.md"), "--markdown has no effect without --card"),
        (("--max-minutes", 1), "--max-minutes has no effect without --time-split"),
    ):
        wrong = run("evaluate", "--bundle", out, *flags)
        assert wrong.exit_code == 2 and message in " ".join(wrong.stderr.split())


def test_doctor_examines_bundle_and_store(bundle, store):
    result = run("doctor", "--bundle", bundle, "--store", store)
    assert result.exit_code == 0, result.output
    assert "fail" not in result.stdout
    said = " ".join(result.stdout.replace("│", " ").split())
    assert "a GPU captures" in said or "never captured" in said  # without a GPU, and with one
    assert run("doctor", "--store", "redis://127.0.0.1:1/0").exit_code == 1
