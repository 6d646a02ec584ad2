"""EAGLE: its network and its tree against plain transcriptions of the papers, without any cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.drafters.registry import check_speculation
from recserve.drafters.shared.rank_tree import rank_tree
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import Budget
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.eagle_transcription import (
    PlainEagle,
    assert_as_transcribed,
    record_drafts,
)
from tests.support.grids import chosen
from tests.support.text_engines import (
    assert_forgotten,
    assert_no_leak,
    eagle,
    engine_for,
    prompts,
)
from tests.support.text_plain import drawn_model


def queries(texts, length=14) -> list[TextQuery]:
    params = SamplingParams(temperature=0.0, max_tokens=length)
    return [TextQuery(np.array(text), params, Speculation("eagle")) for text in texts]


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


@pytest.mark.parametrize("fused", [False, True], ids=["eagle-1", "eagle-3"])
@torch.inference_mode()
def test_drafts_equal_the_transcription(fused, model):
    """Two texts at once, prompts in chunks."""
    drafter = eagle(model, fused, seed=3)
    notes = record_drafts(drafter)
    engine = engine_for(model, 300, {"eagle": drafter})
    engine.run_many(queries(p.tolist() for p in prompts(2)))
    assert_as_transcribed(notes, drafter, model, least=10)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_output": True},
        {"norm_before_residual": True},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True},
    ],
    ids=lambda fields: "+".join(fields),
)
@torch.inference_mode()
def test_drafts_of_the_variants(fields, model):
    drafter = eagle(model, True, seed=4, fields=fields)
    notes = record_drafts(drafter)
    engine_for(model, 300, {"eagle": drafter}).run_many(queries(p.tolist() for p in prompts(2)))
    assert_as_transcribed(notes, drafter, model, least=4)


@torch.inference_mode()
def test_a_cached_prefix_is_cached_for_the_drafter_too(model):
    """The second text begins with the first one's prompt and text; the third ends in its page."""
    drafter = eagle(model, True, seed=5)
    engine = engine_for(model, 300, {"eagle": drafter})
    prompt = prompts(1, seed=2, low=18, high=19)[0].tolist()
    (first,) = engine.run_many(queries([prompt]))
    longer = prompt + first.tokens.tolist()
    notes = record_drafts(drafter)
    for text in (longer + [3, 1], longer[:22], longer[:23] + [5, 5], prompt):
        before = len(notes)
        (answer,) = engine.run_many(queries([text], length=6))
        assert answer.timing.prefix_cached >= 16
        assert_as_transcribed(notes[before:], drafter, model, least=1)


@torch.inference_mode()
def test_a_prefix_without_the_drafter_s_entries_is_not_shared(model):
    drafter = eagle(model, False, seed=6)
    engine = engine_for(model, 300, {"eagle": drafter})
    prompt = prompts(1, seed=2, low=18, high=19)[0]
    engine.run(TextQuery(prompt, SamplingParams(temperature=0.0, max_tokens=4)))
    notes = record_drafts(drafter)
    (answer,) = engine.run_many(queries([prompt.tolist()]))
    assert answer.timing.prefix_cached == 0
    assert_as_transcribed(notes, drafter, model, least=2)


@torch.inference_mode()
def test_drafts_after_preemption(model):
    drafter = eagle(model, True, seed=7)
    notes = record_drafts(drafter)
    engine = engine_for(model, 16, {"eagle": drafter})
    preempted, preempt = [], engine.schedulers["text"]._preempt
    engine.schedulers["text"]._preempt = lambda s: (preempted.append(s), preempt(s))
    engine.run_many(queries(p.tolist() for p in prompts(4, low=8)))
    assert preempted
    assert_as_transcribed(notes, drafter, model, least=12)


@torch.inference_mode()
def test_a_drafter_that_fails_to_read_fails_only_its_texts(model):
    drafter = eagle(model, True, seed=9)
    read, calls = drafter.read, []

    def failing(parts):
        calls.append(len(parts))
        if len(calls) == 4:
            raise RuntimeError("no memory")
        read(parts)

    drafter.read = failing
    engine = engine_for(model, 300, {"eagle": drafter})
    plain = SamplingParams(temperature=0.0, max_tokens=14)
    others = [TextQuery(p, plain) for p in prompts(3)]
    futures = [engine.submit(q) for q in [*queries(p.tolist() for p in prompts(2)), *others]]
    while engine.step():
        pass
    assert {type(f.exception()) for f in futures[:2]} == {RuntimeError}
    assert all(f.exception() is None for f in futures[2:])
    assert_no_leak(engine)
    assert_forgotten(drafter)


class StaticEagle(PlainEagle):
    """EAGLE-1's tree: the ranks of a static tree, cut to the budget as Medusa's trees are."""

    TREE = (
        *((0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0)),
        *((0, 0, 0), (0, 1, 1), (1, 0, 0), (0, 0, 0, 0)),
    )

    def tree(self, depth, num_nodes):
        wanted = rank_tree(self.TREE).within(Budget(num_nodes, depth))
        found = {}
        for ranks in wanted.paths:  # preorder: parents first
            above = found.get(ranks[:-1], ())
            found[ranks] = (*above, self.children(above)[ranks[-1]][0])
        return set(found.values())


@pytest.mark.parametrize("fused", chosen({"eagle-1": False, "eagle-3": True}, "eagle-3"))
@torch.inference_mode()
def test_a_request_s_static_tree(fused, model):
    """Trees shrink near a text's end. Requests with dynamic trees run beside."""
    drafter = eagle(model, fused, seed=3)
    notes = record_drafts(drafter)
    engine = engine_for(model, 300, {"eagle": drafter})
    spoken = Speculation("eagle", tree=StaticEagle.TREE)
    dynamic = queries(p.tolist() for p in prompts(5))
    static = [replace(query, speculation=spoken) for query in dynamic]
    plain = engine.run_many([replace(query, speculation=Speculation()) for query in dynamic])
    answers = engine.run_many(static)
    drafter.depth, drafter.num_nodes = 4, len(StaticEagle.TREE)  # bounds of the comparison
    assert_as_transcribed(notes, drafter, model, least=20, plain=StaticEagle)
    assert len({len(draft) for *_, draft in notes if len(draft)}) > 1
    mixed = engine.run_many([*static, *dynamic[:3]])
    for one, other in zip([*plain, *plain, *plain[:3]], [*answers, *mixed], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_a_static_tree_must_fit(model):
    drafter = eagle(model, True)
    check_speculation(Speculation("eagle", tree=StaticEagle.TREE), drafter, True)
    for tree in (tuple((rank,) for rank in range(21)), tuple((0,) * n for n in range(1, 70))):
        with pytest.raises(ValueError, match="has no memory for it"):
            check_speculation(Speculation("eagle", tree=tree), drafter, True)


def test_a_rule_that_refuses_forks_gets_chains(model):
    drafter = eagle(model, False, seed=2)
    notes = record_drafts(drafter)
    engine = engine_for(model, 300, {"eagle": drafter})
    params = SamplingParams(temperature=0.0, max_tokens=14)
    spoken = Speculation("eagle", "rejection", tree=StaticEagle.TREE)
    engine.run(TextQuery(prompts(1)[0], params, spoken))
    assert any(len(draft) > 1 for *_, draft in notes)
    assert all(draft.depth == len(draft) for *_, draft in notes)
