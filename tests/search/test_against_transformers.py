"""Beam search against `generate` of transformers: the same weights in other code."""

import numpy as np
import pytest
import torch

from benchmarks.support.baselines.constraints import TrieProcessor, allowed_tokens
from benchmarks.support.baselines.llama import to_llama
from recserve.core.request import Prefix, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.recommender import Recommender
from tests.support.reference_models import history, recommender

SMALL = EngineConfig(kv_bytes=8 * 2**20)


def generate(theirs, prefix: Prefix, beams: int, **constraint):
    """Sequences and summed log-probabilities, best first; one beam is greedy search there."""
    tokens = prefix.inputs.tokens[None]
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
        prefix = history(model, events, events)
        allowed = allowed_tokens(trie, model.config.level_offsets, len(prefix.inputs))
        expected, scores = generate(theirs, prefix, beams, prefix_allowed_tokens_fn=allowed)
        for _ in ("cold", "cached"):
            slate = engine.run(SlateQuery(prefix=prefix, trie=trie, k=beams, beam_width=beams))
            assert slate.rows.tolist() == rows_of(model, expected)
            np.testing.assert_allclose(slate.scores, scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("beams", [5, 20])
def test_beam_search_over_children_equals_generate_with_a_processor(beams):
    """A processor that renormalises over the valid children makes generate score as we do."""
    model, trie = recommender(0, "children")
    theirs, engine = to_llama(model), build_engine(EngineModels(model), SMALL)
    for events in (1, 25):
        prefix = history(model, events, events)
        processor = TrieProcessor(trie, model.config.level_offsets, len(prefix.inputs), True)
        expected, scores = generate(theirs, prefix, beams, logits_processor=[processor])
        slate = engine.run(SlateQuery(prefix=prefix, trie=trie, k=beams, beam_width=beams))
        assert slate.rows.tolist() == rows_of(model, expected)
        np.testing.assert_allclose(slate.scores, scores, rtol=0, atol=1e-4)
