"""Captured drafts through the Triton kernels, interpreted: what a graph of a draft launches."""

from collections import Counter

import pytest
import torch

from recserve.engine.capture import EagerRecorder
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.engine.text.test_captured_drafts import MAKERS, engine_with, note_drafts
from tests.support.text_engines import prompts, shared_model
from tests.support.triton_interpreter import interpreter

SIZES = {"width": 2, "depth": 3, "num_nodes": 6}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dspark-rnn", "specformer", "draft-model"])
@torch.inference_mode()
def test_kernels_draft_the_same_in_fixed_shapes(kind, force_kernels, monkeypatch):
    """Padded and packed launches of the same kernels give the same drafts and entries."""
    force_kernels("triton")
    launches, launch = Counter(), interpreter.GridExecutor.__call__

    def counted(self, *arguments, **options):
        launches[self.fn.__name__] += 1
        return launch(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    model, results = shared_model(), []
    name = MAKERS[kind](model).name
    requests = [
        TextQuery(prompt, SamplingParams(temperature, max_tokens=6, seed=n), Speculation(name))
        for n, (prompt, temperature) in enumerate(zip(prompts(2, low=4), (0.0, 0.9), strict=True))
    ]
    for recorder in (None, EagerRecorder()):
        engine = engine_with(model, MAKERS[kind](model, seed=5, **SIZES), recorder, 60, (3,))
        drafts = note_drafts(engine)
        texts = [answer.tokens.tolist() for answer in engine.run_many(requests)]
        results.append((texts, drafts))
    assert launches["_attend"] > 20
    (plain_texts, launched), (texts, captured) = results
    assert texts == plain_texts and engine.stats().graph_drafts["replayed"] > 1
    assert launched.keys() == captured.keys() and len(launched) > 2
    for key, (nodes, entries) in launched.items():
        assert captured[key][0] == nodes
        torch.testing.assert_close(captured[key][1], entries, rtol=1e-5, atol=1e-5)
