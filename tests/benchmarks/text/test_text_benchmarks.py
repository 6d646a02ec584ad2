"""The benchmarks of text run, compare texts, and fail where they differ."""

import json
import sys
import time

import pytest
import torch

from benchmarks.support.baselines.llama_cpp import LlamaCpp, missing, write_gguf
from benchmarks.text import drafters, lossless, specformer_memory
from benchmarks.text import throughput as text
from recserve.models.attention import DenseAttention
from tests.support.paths import DATA
from tests.support.walking_model import drawn_language_model

pytestmark = pytest.mark.slow

TINY = ["text", "--model", "64x2", "--vocabulary", "300", "--prompt", "40", "--tokens", "12"]
TINY += ["--repeats", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_text_beside_transformers(monkeypatch, tmp_path):
    written = tmp_path / "text.json"
    monkeypatch.setattr(sys, "argv", [*TINY, "--dtypes", "float32", "--json", str(written)])
    assert text.main() == 0
    (cell,) = json.loads(written.read_text())["cells"]
    found = cell["figures"]
    theirs = {*text.THEIRS} if missing() else {*text.THEIRS, "llama.cpp"}
    assert set(found) == {*text.OURS, *theirs}
    assert found["oracle-100"]["tokens_per_step"] > found["oracle-70"]["tokens_per_step"] > 1
    assert found["ngram"]["tokens_per_step"] > 1
    for ours, theirs in (("oracle-100", "assisted-100"), ("oracle-70", "assisted-70")):
        texts = [cell["runs"][name][0]["texts"] for name in (ours, theirs)]
        assert texts[0] == texts[1]


@pytest.mark.skipif(bool(missing()), reason=f"not installed: {missing()}: did not run")
@torch.inference_mode()
def test_llama_cpp_writes_what_the_model_says(tmp_path):
    """Weights without a walk, so that every token hangs on attention and its rotary pairs."""
    model = drawn_language_model(256, 2, 300, torch.float32, spread=0.0)
    write_gguf(model, tmp_path / "model.gguf")
    theirs = LlamaCpp(tmp_path / "model.gguf", 64, 1, torch.float32)
    tokens = prompt = [7, 290, 31, 112, 5, 5, 64]
    for _ in range(24):
        hidden = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], DenseAttention())
        tokens = [*tokens, int(model.logits(hidden[0, -1]).argmax())]
    assert len(set(tokens)) > 12
    for _ in range(2):  # the second finds nothing of the first
        assert theirs.write(prompt, 24, time.perf_counter)[0] == tokens[len(prompt) :]
    theirs.close()


def test_it_fails_where_texts_differ(monkeypatch):
    monkeypatch.setattr(sys, "argv", [*TINY, "--dtypes", "float32"])
    honest = text.Theirs.write

    def wrong(self, prompts, method, tokens):
        written = honest(self, prompts, method, tokens)
        written.texts[0][-1] += 1
        return written

    monkeypatch.setattr(text.Theirs, "write", wrong)
    assert text.main() == 1


@pytest.mark.skipif(not (DATA / "text").is_dir(), reason=f"no data at {DATA}: did not run")
@pytest.mark.parametrize(
    "options, kinds", [([], [""]), (["--together", "2", "--load-aware"], ["", drafters.LOAD_AWARE])]
)
def test_drafters_on_the_reference_checkpoint(options, kinds, monkeypatch, tmp_path):
    written = tmp_path / "drafters.json"
    arguments = ["drafters", "--prompts", "2", "--tokens", "8", "--threads", "1", *options]
    arguments += ["--json", str(written), "--plot", str(tmp_path / "drafters.png")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert drafters.main() == 0
    assert (tmp_path / "drafters.png").read_bytes()[:4] == b"\x89PNG"
    content = json.loads(written.read_text())
    assert set(content["workloads"]) == {"books", "Spec-Bench"}
    for workload in content["workloads"].values():
        drafted = {n + kind for n in ("ngram", "suffix", "lookahead") for kind in kinds}
        assert set(workload["rows"]) == {"none", *drafted}
        assert workload["rows"]["none"]["tokens_per_step"] == 1.0
        assert workload["rows"]["none"]["kappa"] == 1.0
        for name in {*workload["rows"]} - {"none"}:
            sums = workload["sums"][name]
            if sums["drafted"]:  # load-aware drafts may be cut to nothing
                kappa = (1 + sum(sums["accepted"]) / sums["drafts"]) * sums["levels"]
                assert workload["rows"][name]["kappa"] == kappa / sums["drafted"]
        assert all(row["differ"] == 0 for row in workload["rows"].values())


@pytest.mark.skipif(not (DATA / "text").is_dir(), reason=f"no data at {DATA}: did not run")
def test_texts_beside_plain_decoding_and_the_margin_of_a_difference(monkeypatch, tmp_path):
    written = tmp_path / "lossless.json"
    options = ["--prompts", "1", "--tokens", "6", "--threads", "1", "--dtypes", "float32"]
    options += ["--temperatures", "0.7", "--drafters", "suffix", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["lossless", *options])
    assert lossless.main() == 0
    assert all(not row["differ"] for row in json.loads(written.read_text())["rows"])
    honest = lossless.write

    def wrong(engine, name, prompts, params, together):
        texts = honest(engine, name, prompts, params, together)
        if name == "suffix":
            texts[0][2] = (texts[0][2] + 1) % 512
        return texts

    monkeypatch.setattr(lossless, "write", wrong)
    assert lossless.main() == 1
    differing = [row for row in json.loads(written.read_text())["rows"] if row["differ"]]
    assert {row["drafter"] for row in differing} == {"suffix"}
    # Plain decoding wrote the token that it preferred, so any other has a margin above 0.
    assert all(row["largest_margin"] > 0 for row in differing)


def test_memory_of_specformer_by_draft_length(tmp_path):
    """Both methods compute the same loss; the plain one needs more memory."""
    written = tmp_path / "memory.json"
    sizes = ["--hidden", "64", "--vocabulary", "9000", "--rows", "2", "--slot-rows", "64"]
    assert specformer_memory.main(["--lengths", "4", *sizes, "--json", str(written)]) == 0
    (row,) = json.loads(written.read_text())["rows"]
    assert row["accumulated"]["loss"] == pytest.approx(row["plain"]["loss"], rel=1e-5)
    assert row["plain"]["peak_mib"] > 1.3 * row["accumulated"]["peak_mib"] > 0
