"""The comparison of drafters trains, measures, resumes, and prints what it measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.text import comparison_training
from benchmarks.text import drafter_comparison as comparison
from benchmarks.text.comparison_report import by_temperature, print_tables, save_plot, table
from recserve.speculation.drafters.registry import drafter_classes
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.distillation import distill
from recserve.training.text.distilled_text import DistillationSettings
from recserve.training.text.drafters.kinds import KINDS
from recserve.training.text.language_model import LanguageRecipe, train_language_model
from tests.support.paths import DATA, ROOT

RECIPE = LanguageRecipe(
    vocab_size=280,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    max_positions=512,
    batch=8,
    window=64,
    steps=20,
    schedule=Schedule(1, 1e-2),
)
RHYME = "the cat sat on the mat and the dog ran to the log, then the cat ran after the dog.\n"


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    train_language_model([RHYME] * 600, folder, TrainOptions(device="cpu"), RECIPE)
    return folder


@pytest.fixture(scope="module")
def distilled(target) -> Path:
    text, out = target.parent / "rhyme.txt", target.parent / "own"
    text.write_text(RHYME * 300)
    distill(target, [text], out, DistillationSettings(tokens=16_000), torch.device("cpu"))
    return out


def row(arm: str, tree: str, batch: int, temperature: float = 0.0, **figures) -> dict:
    """Returns a row as the benchmark writes it."""
    return {
        "arm": arm,
        "tree": tree,
        "batch": batch,
        "temperature": temperature,
        "options": {"prompts": 3, "tokens": 4, "length": 5, "threads": 1, "clock": "cpu"},
        "machine": {"processor": "p", "torch": "2"},
        "figures": {
            "tokens_per_step": 2.0,
            "acceptance_by_position": [0.5, 0.25, 0.125, 0.0, 0.0],
            "nodes_per_step": 5.0,
            "kappa": 1.5,
            "draft_share": 0.125,
            "ratio": 1.25,
            "drafts": 10,
            "plain_tokens_per_s": 1000.0,
        }
        | figures,
    }


def test_the_table_has_a_line_for_each_drafter_and_tree():
    rows = [
        row("one", "tree", 1),
        row("one", "tree", 8, ratio=0.5),
        row("two", "chain-4", 1, tokens_per_step=3.0),
        row("two", "tree", 1, drafts=0),  # a rule that the drafter does not serve
    ]
    title, _, _, _, *lines = table(rows[:3], 0.0).splitlines()
    assert "1,000 / 1,000 tokens/s at batch 1 / 8" in title
    assert lines == [
        "| one | tree | 2.00 | 0.50 0.25 0.12 0.00 0.00 | 5.0 | 1.50 | 12% | 12% | 1.25 | 0.50 |",
        "| two | chain-4 | 3.00 | 0.50 0.25 0.12 0.00 0.00 | 5.0 | 1.50 | 12% |  | 1.25 |  |",
    ]


@pytest.mark.slow
def test_tables_and_plot_of_all_rows(capsys, tmp_path):
    rows = [row("short", "tree", 1), row("none", "chain", 1, drafts=0)]
    rows += [row("long", "tree", 1, heat, tokens_per_step=3.0) for heat in (0.0, 1.0)]
    print_tables(rows)
    printed = capsys.readouterr().out
    assert printed.count("**Temperature") == 2 and "none" not in printed
    assert printed.index("| long |") < printed.index("| short |")
    for _ in range(2):
        save_plot(rows, tmp_path / "plot.svg")
        drawn = (tmp_path / "plot.svg").read_bytes()
    assert b"<svg" in drawn
    save_plot(rows, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == drawn


def test_every_kind_of_the_registry_is_trained(tmp_path):
    assert set(comparison.TRAINERS) == {*KINDS, "draft_model"}
    options = comparison.arguments(["--work", str(tmp_path), "--target", "t", "--text", "x"])
    assert comparison.chosen(options.kinds, list(comparison.TRAINERS), "--kinds") == [
        *KINDS,
        "draft_model",
    ]


def test_drafters_without_weights_are_measured(target, tmp_path):
    options = comparison.arguments(
        ["--work", str(tmp_path), "--target", str(target), "--text", "x"]
    )
    names = [name for name, cls in drafter_classes().items() if not cls.needs_weights]
    arms = comparison.arms_of(list(comparison.TRAINERS), options)  # nothing is trained
    assert ["none", *(arm.name for arm in arms)] == names and "suffix" in names


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--trees", "bush"], "choose tree, tree-N, chain, chain-N or static"),
        (["--trees", "tree-x"], "choose tree, tree-N, chain, chain-N or static"),
        (["--trees", "static-9"], "choose tree, tree-N, chain, chain-N or static"),
        ([], "--target and --text are needed"),
        (["--table", "--prompts", "63"], "--prompts needs at least 2 times the largest of --batch"),
    ],
)
def test_wrong_flags_are_named(flags, said, capsys, tmp_path):
    with pytest.raises(SystemExit):
        comparison.arguments(["--work", str(tmp_path), *flags])
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--kinds names .'x'.; choose from"):
        comparison.chosen(["x"], ["medusa"], "--kinds")


def test_the_page_has_the_tables_of_the_committed_rows():
    results = ROOT / "docs" / "results"
    rows = comparison.read_rows(results / "drafters" / "rows.jsonl")
    page = (results / "drafters.md").read_text(encoding="utf-8")
    assert len(rows) > 200 and not sum(row["figures"]["differ"] for row in rows)
    for heat, own in by_temperature(rows).items():
        assert table(own, heat) in page


def test_the_static_tree_is_that_of_eagle_1():
    cell = comparison.Cell(comparison.Arm("eagle", "eagle"), "static", 1, 0.0)
    paths = cell.speculation.tree
    assert np.bincount([len(path) for path in paths]).tolist() == [0, 4, 8, 8, 3, 2]
    assert all(len(path) == 1 or path[:-1] in paths for path in paths)


def test_weights_of_drafters_with_several_folders(tmp_path):
    for name in ("set/model-1", "set/model-2", "joint/target", "joint/heads", "one"):
        (tmp_path / name).mkdir(parents=True)
    models, own = comparison.weights_of(tmp_path / "set")
    assert [path.name for path in models] == ["model-1", "model-2"] and own is None
    joint = tmp_path / "joint"
    assert comparison.weights_of(joint) == ((joint / "heads",), joint / "target")
    assert comparison.weights_of(tmp_path / "one") == ((tmp_path / "one",), None)


def key(row: dict) -> tuple[str, str, int]:
    return row["arm"], row["tree"], row["batch"]


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "text").is_dir(), reason=f"no data at {DATA}: did not run")
def test_a_comparison_resumes_and_prints(target, distilled, tmp_path, capsys, monkeypatch):
    work = tmp_path / "work"
    flags = ["--target", str(target), "--text", str(distilled), "--work", str(work)]
    flags += ["--minutes", "0.02", "--kinds", "medusa", "mask_tokens", "draft_model"]
    flags += ["--trees", "chain-2", "tree", "--prompts", "6", "--length", "8", "--tokens", "8"]
    flags += ["--temperatures", "1", "--batches", "1", "3", "--threads", "1"]
    assert comparison.main(flags) == 0
    printed = capsys.readouterr().out
    assert "| medusa | tree |" in printed and "| medusa | chain-2 |" in printed
    path = work / "rows.jsonl"
    rows = {key(row): row for row in comparison.read_rows(path)}
    arms = ["ngram", "suffix", "lookahead", "medusa", "mask_tokens", "mask_tokens_linear"]
    arms += ["draft_model", "specinfer"]
    trees, batches = ("chain-2", "tree"), (1, 3)
    assert rows.keys() == {(a, t, b) for a in arms for t in trees for b in batches}
    for found in rows.values():
        figures = found["figures"]
        assert figures["differ"] == 0 and figures["tokens_per_step"] >= 1
        assert not figures["drafts"] or figures["draft_share"] > 0
    chain = rows["medusa", "chain-2", 1]
    sums = chain["sums"]["medusa"]
    assert sums["levels"] == sums["drafted"] <= 2 * sums["drafts"]
    per_draft = 1 + sum(sums["accepted"]) / sums["drafts"]
    assert chain["figures"]["kappa"] == pytest.approx(per_draft)
    # A second run trains and measures only what is missing.
    lost = rows["medusa", "tree", 3]
    *lines, last = [json.dumps(row) + "\n" for row in rows.values() if row is not lost]
    path.write_text("".join([*lines, last, json.dumps(lost)]))  # a line without its end
    monkeypatch.setattr(comparison_training, "TRAINERS", {})
    assert comparison.main(flags) == 0
    now = {key(row): row for row in comparison.read_rows(path)}
    assert now.keys() == rows.keys()
    assert [name for name in rows if now[name] != rows[name]] == [key(lost)]
    with pytest.raises(SystemExit, match="was made with options = .*use another --work"):
        comparison.main([*flags, "--tokens", "9"])
    with pytest.raises(SystemExit, match="was made with minutes = 0.02, not 1"):
        comparison.main([*flags, "--minutes", "1"])
    assert comparison.main(["--work", str(work), "--table"]) == 0
