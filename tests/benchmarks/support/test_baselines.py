"""ModelAdapter and beam search against transformers: the same weights in somebody else's code."""

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks.rank import candidates as rank
from benchmarks.recommend import beam as recommend
from benchmarks.recommend import beam_methods as recommend_methods
from benchmarks.support.baselines.constraints import TrieProcessor, allowed_tokens
from benchmarks.support.baselines.llama import empty_model, to_llama
from recserve.core.request import Prefix, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.recommender import Recommender
from recserve.models.saving import named_tensors
from tests.support.reference_models import drawn, history, recommender

SMALL = EngineConfig(kv_bytes=8 * 2**20)
FAMILIES = {
    "llama": DecoderConfig(48, 3, 6, 2, 8, 80),
    "llama-mha-wide-heads": DecoderConfig(32, 2, 4, 4, 16, 64, rope_theta=5e5, norm_eps=1e-5),
    "qwen2": DecoderConfig(48, 3, 6, 3, 8, 80, attention_bias=True, rope_theta=1e6),
    "qwen3": DecoderConfig(48, 3, 6, 1, 16, 80, qk_norm=True, rope_theta=1e6),
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
@torch.inference_mode()
def test_trunk_equals_transformers(config):
    theirs = empty_model(config, 10)
    for seed in range(3):
        text = LanguageModel(LanguageModelConfig(config, 10)).eval()
        drawn(text, seed)
        theirs.load_state_dict(named_tensors(text))
        ours = text.decoder
        x = torch.randn(2, 37, config.hidden_size, generator=torch.Generator().manual_seed(seed))
        for start in (0, 900):
            positions = torch.arange(start, start + 37)[None].expand(2, -1)
            expected = theirs.model(inputs_embeds=x, position_ids=positions).last_hidden_state
            hidden = ours(x, positions, DenseAttention())
            torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


def generate(theirs, root: Prefix, beams: int, **constraint):
    """Sequences and summed log-probabilities, best first; one beam is greedy search there."""
    tokens = root.inputs.tokens[None]
    wide = {"num_beams": beams, "num_return_sequences": beams, "length_penalty": 0.0}
    out = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **(wide if beams > 1 else {}),
        **constraint,
    )
    written = out.sequences[:, tokens.shape[1] :]
    if beams > 1:
        return written, out.sequences_scores
    steps = zip(out.logits, written[0], strict=True)
    return written, sum(logits.log_softmax(-1)[:, token] for logits, token in steps)


def rows_of(model: Recommender, sequences: torch.Tensor) -> list[int]:
    rows = {tuple(tokens): row for row, tokens in enumerate(model.item_tokens.tolist())}
    return [rows[tuple(tokens)] for tokens in sequences.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 5, 20])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beam_search_equals_generate_with_allowed_tokens(seed, beams):
    """Vocabulary normalisation is what generate computes with a prefix_allowed_tokens_fn."""
    model, trie = recommender(seed, "vocabulary")
    theirs, engine = to_llama(model), build_engine(EngineModels(model), SMALL)
    for events in (1, 7, 25):
        root = history(model, events, events)
        allowed = allowed_tokens(trie, model.config.level_offsets, len(root.inputs))
        expected, scores = generate(theirs, root, beams, prefix_allowed_tokens_fn=allowed)
        for _ in ("cold", "cached"):
            slate = engine.run(SlateQuery(prefix=root, trie=trie, k=beams, beam_width=beams))
            assert slate.rows.tolist() == rows_of(model, expected)
            np.testing.assert_allclose(slate.scores, scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("beams", [5, 20])
def test_beam_search_over_children_equals_generate_with_a_processor(beams):
    """A processor that renormalises over the valid children makes generate score as we do."""
    model, trie = recommender(0, "children")
    theirs, engine = to_llama(model), build_engine(EngineModels(model), SMALL)
    for events in (1, 25):
        root = history(model, events, events)
        processor = TrieProcessor(trie, model.config.level_offsets, len(root.inputs), True)
        expected, scores = generate(theirs, root, beams, logits_processor=[processor])
        slate = engine.run(SlateQuery(prefix=root, trie=trie, k=beams, beam_width=beams))
        assert slate.rows.tolist() == rows_of(model, expected)
        np.testing.assert_allclose(slate.scores, scores, rtol=0, atol=1e-4)


def test_only_a_codes_model_is_a_llama():
    config = DecoderConfig(32, 1, 4, 4, 8, 48)
    with pytest.raises(ValueError, match="'items'"):
        to_llama(Recommender(RecommenderConfig(config, (4, 4), "items")))


TINY = ["--threads", "1", "--repeats", "1", "--budget-s", "60"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "benchmark,arguments",
    [
        (recommend, ["--models", "64x1", "--beams", "3", "40", "--batches", "2"]),
        (rank, ["--model", "64x1", "--candidates", "33"]),
    ],
    ids=["recommend", "rank"],
)
def test_benchmarks_compare_equals(benchmark, arguments, monkeypatch, tmp_path):
    """Every baseline runs and answers as the engine does; the figures are written."""
    written = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, *TINY, "--json", str(written)])
    threads = torch.get_num_threads()
    try:
        assert benchmark.main() == 0
    finally:
        torch.set_num_threads(threads)
    for cell in json.loads(written.read_text())["cells"]:
        assert len(cell["runs"]) >= 3
        assert all(run["median_ms"] > 0 for run in cell["runs"].values())


@pytest.mark.slow
def test_a_benchmark_fails_where_answers_differ(monkeypatch):
    """The comparison notices a method that answers something else."""
    arguments = ["benchmark", "--models", "64x1", "--beams", "5", "--methods", "bare-tree", *TINY]
    monkeypatch.setattr(sys, "argv", arguments)
    bare_tree = recommend_methods.bare_tree

    def wrong(model, prompts, search):
        return bare_tree(model, prompts[:, :-1], search)

    monkeypatch.setattr(recommend_methods, "bare_tree", wrong)
    assert recommend.main() == 1
