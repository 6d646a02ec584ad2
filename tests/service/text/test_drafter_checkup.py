"""The doctor's static checks of drafter files, and `recserve doctor DRAFTER` as a user runs it."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recserve.cli import app
from recserve.doctor import drafter_trial
from recserve.doctor.drafter_checks import (
    check_copies,
    check_norms,
    check_positions,
    check_tokenizer,
    check_vocabulary,
)
from recserve.doctor.drafter_checkup import examine_drafter
from recserve.doctor.drafter_kind import drafter_files
from recserve.doctor.drafter_trial import (
    DraftMeasure,
    compare,
    cut_openings,
    measure_cost,
    write_openings,
)
from recserve.models.loading import UnsupportedModel
from recserve.models.saving import save_language_model
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.drafter_folders import changed_copy, write_drawn
from tests.support.text_engines import eagle
from tests.support.text_plain import drawn_model
from tests.support.tiny_tokenizer import tiny_tokenizer

KINDS = {
    "eagle-1": "eagle",
    "eagle-3": "eagle",
    "mtp": "mtp",
    "dflash2": "block",
    "dspark": "block",
    "specformer": "specformer",
    "medusa": "medusa",
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def target():
    return drawn_model(0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory, target):
    """A folder of the target, with a tokenizer."""
    folder = tiny_tokenizer(tmp_path_factory.mktemp("target"))
    save_language_model(target, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(llm):
    return TextTokenizer.open(llm)


@pytest.fixture
def eagle3(tmp_path):
    return write_drawn("eagle-3", tmp_path / "eagle3")


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_tell_the_drafter(kind, tmp_path):
    """No configuration is needed, and one that names another system changes nothing."""
    folder = write_drawn(kind, tmp_path / "files")
    assert drafter_files(folder).kinds[0] == KINDS[kind]
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    assert drafter_files(folder).kinds[0] == KINDS[kind]


def test_folders_without_a_drafter_are_refused(tmp_path, eagle3, llm):
    assert drafter_files(llm).kinds[0] == "draft_model"
    with pytest.raises(UnsupportedModel, match="no folder"):
        drafter_files(tmp_path / "none")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"convert medusa_lm_head.pt"):
        drafter_files(tmp_path / "pickle")

    def other_names(fields, weights):
        for name in list(weights):
            weights[f"other.{name}"] = weights.pop(name)

    with pytest.raises(UnsupportedModel, match="no known drafter.*NAME=DIR"):
        drafter_files(changed_copy(eagle3, tmp_path / "renamed", other_names))


def test_a_name_that_the_tensors_contradict_is_refused(eagle3, target, tokenizer):
    (finding,) = examine_drafter(f"medusa={eagle3}", target, tokenizer)
    assert finding.state == "fail" and "does not read" in finding.detail
    (finding,) = examine_drafter(f"eagel={eagle3}", target, tokenizer)
    assert finding.state == "fail" and "'eagel'" in finding.detail


def test_norms_around_zero_are_no_factors(eagle3, tmp_path):
    def centred(fields, weights):
        for name in weights:
            if "norm" in name:
                weights[name] = weights[name] - weights[name].mean()

    assert check_norms(drafter_files(eagle3)).state == "ok"
    folder = changed_copy(eagle3, tmp_path / "centred", centred)
    finding = check_norms(drafter_files(folder))
    assert finding.state == "warn" and "do not look like factors" in finding.detail
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "qwen3_next"}))
    assert check_norms(drafter_files(folder)).state == "ok"


def test_only_the_weights_of_norms_are_norms(eagle3, tmp_path):
    def more(fields, weights):
        names = ("gate.weight", "norm.bias", "normal", "weight_norm")
        weights.update({name: torch.zeros(3) for name in names})

    folder = changed_copy(eagle3, tmp_path / "more", more)
    assert check_norms(drafter_files(folder)) == check_norms(drafter_files(eagle3))


def test_the_vocabulary_covers_what_the_target_writes(eagle3, target):
    files = drafter_files(eagle3)  # proposes the even tokens
    few = check_vocabulary(files, target, np.array([0, 2, 5, 7]))
    assert few.state == "warn" and "20 of 40 tokens, 50%" in few.detail
    assert check_vocabulary(files, target, np.array([0, 2, 4])).state == "ok"


def test_another_rotary_base_is_shown(eagle3, tmp_path, target):
    assert check_positions(drafter_files(eagle3), target).state == "ok"
    folder = changed_copy(eagle3, tmp_path / "base", lambda f, w: f.update(rope_theta=5e5))
    finding = check_positions(drafter_files(folder), target)
    assert finding.state == "warn" and "500000" in finding.detail


def test_a_foreign_embedding_is_shown(eagle3, tmp_path, target):
    def embedded(weight):
        return lambda fields, weights: weights.update({"embed_tokens.weight": weight})

    torch.manual_seed(0)
    own = target.tokens.weight
    for number, (weight, state, said) in enumerate(
        (
            (own.clone(), "ok", "embed_tokens.weight is the target's"),
            (own + 0.3 * torch.randn(own.shape), "ok", "cosine"),
            (torch.randn(own.shape), "warn", "another target"),
        )
    ):
        folder = changed_copy(eagle3, tmp_path / f"{number}", embedded(weight))
        finding = check_copies(drafter_files(folder), target)
        assert finding.state == state and said in finding.detail


def test_a_draft_model_may_have_its_own_embedding(tmp_path, target):
    """Every other drafter reads the target's states, so that a foreign embedding is suspect."""
    save_language_model(drawn_model(1), tmp_path)
    files = drafter_files(tmp_path)
    finding = check_copies(files, target)
    assert files.kinds[0] == "draft_model" and finding.state == "ok"
    assert "embed_tokens.weight is its own (cosine" in finding.detail


def test_tokens_and_templates_of_both_folders_agree(eagle3, tmp_path, target, tokenizer):
    def check():
        return check_tokenizer(drafter_files(eagle3), target, TextTokenizer.open(tmp_path))

    tiny_tokenizer(tmp_path)
    assert check().state == "ok"
    tiny_tokenizer(eagle3)
    assert check().state == "ok" and "has the same" in check().detail
    (eagle3 / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("assistant:", "model:"))
    assert check().state == "warn" and "chat template" in check().detail
    tiny_tokenizer(eagle3, special=("<begin>", "</s>"))
    assert check().state == "fail" and "'<begin>'" in check().detail


def test_a_gain_must_exceed_chance():
    def measured(rates):
        drafts = np.full(len(rates), 20)
        return DraftMeasure(drafts, (np.array(rates) * 20).round().astype(int), (), ())

    one = measured([0.5, 0.6, 0.4, 0.5])
    assert compare(one, measured([0.9, 1.1, 0.8, 1.0])).is_better
    assert not compare(one, measured([0.9, 0.2, 0.8, 0.4])).is_better
    assert not compare(one, one).is_better
    assert compare(one, measured([1.0, 1.1, 0.9, 1.0])).mean == pytest.approx(0.5)


def test_openings_fit_the_positions_of_the_target(target):
    written = write_openings(target)
    size = written.tokens.shape[1]
    assert size + written.num_output <= target.config.decoder.max_positions
    assert len({tuple(row) for row in written.tokens.tolist()}) == len(written.tokens)
    text = np.arange(200) % 40
    cut = cut_openings(text, target)
    assert cut.tokens[0].tolist() == text[:size].tolist()
    assert cut.tokens[-1].tolist() == text[-size:].tolist()
    with pytest.raises(ValueError, match="32 are needed"):
        cut_openings(text[:size], target)


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_reports_a_drafter(llm, tmp_path):
    heads = write_drawn("medusa", tmp_path / "heads")
    letters = "".join(TextTokenizer.open(llm).tokenizer.get_vocab())
    (tmp_path / "text.txt").write_text(letters * 20, encoding="utf-8")
    result = run(heads, "--llm", llm, "--text", tmp_path / "text.txt", "--device", "cpu")
    for name in ("kind", "files", "vocabulary", "acceptance", "cost"):
        assert f"│ {name} " in result.output, result.output
    assert result.exit_code == int("│ fail " in result.output)
    shutil.rmtree(heads)
    result = run(heads, "--llm", llm)
    assert result.exit_code == 1 and "no folder" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("heads",),
        ("--text", "text.txt"),
        ("heads", "--llm", "there-is-none"),
        ("heads", "--llm", ".", "--store", "lmdb:x"),
    ],
    ids=" ".join,
)
def test_a_wrong_call_is_refused(arguments):
    assert run(*arguments).exit_code == 2


def test_the_cost_of_a_draft_leaves_steps_without_a_draft_out(target, monkeypatch):
    """Each reading of the clock is a second later. A draft is one proposal and at most one read."""
    seconds = iter(range(10**9))
    monkeypatch.setattr(drafter_trial, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    drafter = eagle(target, fused=True)
    calls = dict(vars(drafter))
    cost = measure_cost(target, drafter, write_openings(target))
    assert 1000 <= cost.draft_ms <= 2000
    assert vars(drafter).keys() >= calls.keys() and "propose" not in vars(drafter)
