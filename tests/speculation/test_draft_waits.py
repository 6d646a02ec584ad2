"""Drafters that run networks: on a pretended device the host waits for nothing in a draft."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.block_drafter import VARIANTS, block
from tests.support.grids import chosen
from tests.support.pretend_cuda import PretendCuda
from tests.support.specformer_drafter import specformer
from tests.support.walking_model import drawn_language_model

VOCABULARY = 40
EXPANSIONS = {"draft model": (1,) * 4, "draft model's tree": (2, 1, 2)}
KINDS = (*VARIANTS, "specformer", *EXPANSIONS)
SHOWN = ("dflash2", "dspark-rnn", "specformer", *EXPANSIONS)


def made(kind, rng):
    """Returns a target and a drafter with a drawn number of nodes, on the device."""
    nodes = int(rng.integers(3, 20))
    model, small = (drawn_language_model(64, n, VOCABULARY, torch.float32) for n in (2, 1))
    if kind in EXPANSIONS:
        drafter = ModelDrafter(small.to("cuda"), VOCABULARY, EXPANSIONS[kind])
    elif kind == "specformer":
        drafter = specformer(model, num_nodes=nodes)
        drafter.network.to("cuda")
    else:
        drafter = block(model, kind, num_nodes=nodes)
        drafter.network.to("cuda")
    return model.to("cuda"), drafter


def drawn_requests(rng):
    """Returns one to four texts with drawn parameters, budgets and rules."""
    requests = []
    for number in range(int(rng.integers(1, 5))):
        params = SamplingParams(
            temperature=float(rng.choice((0.0, 0.7, 1.3))),
            max_tokens=int(rng.integers(5, 9)),
            seed=number,
        )
        if rng.random() < 0.5:
            params = replace(params, top_k=12, top_p=0.9, min_p=0.02)
        nodes = rng.choice((None, 1, 3, 16))
        speculation = Speculation(
            "own", str(rng.choice(("sample", "block"))), None if nodes is None else int(nodes)
        )
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(3, 30)))
        requests.append(TextQuery(prompt, params, speculation))
    return requests


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", chosen(KINDS, *SHOWN))
def test_a_draft_waits_for_nothing(kind, seed, force_kernels):
    force_kernels("torch")
    rng = np.random.default_rng((seed, KINDS.index(kind)))
    with PretendCuda() as device:
        model, drafter = made(kind, rng)
        config = EngineConfig(page_size=4, kv_bytes=2**22, graphs=False, load_aware=False)
        engine = build_engine(EngineModels(text=model, drafters={"own": drafter}), config)
        engine.run_many(drawn_requests(rng))  # makes constants
        waits, drafts = list[str](), []

        def watch(call):
            def watched(*args):
                device.syncs.clear()
                found = call(*args)
                waits.extend(sync.where for sync in device.syncs)
                drafts.extend(found or ())
                return found

            return watched

        drafter.propose, drafter.read = watch(drafter.propose), watch(drafter.read)
        engine.run_many(drawn_requests(rng))
        assert waits == []
        filled = [draft for draft in drafts if len(draft)]
        assert filled
        for draft in filled:
            assert draft.tokens.is_cuda and draft.parents.is_cuda
            depths = []
            for parent in draft.parents.cpu().tolist():
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
            assert max(depths) <= draft.depth <= len(draft)
            assert draft.is_chain <= (len(draft) == max(depths))
