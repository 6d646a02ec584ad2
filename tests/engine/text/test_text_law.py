"""Drawn drafts in the engine: the written text has the target's distribution under every rule.

Beside other work too: text and recommendations through one engine.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.acceptance.noise import DRAFT, gumbel_of_tokens, step_keys
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import TextDraft
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.grids import chosen
from tests.support.reference_models import history, recommender
from tests.support.text_engines import engine_for
from tests.support.text_plain import VOCABULARY, drawn_model, last_logits, processed

KEPT = (1, 4, 9, 20)
ONLY = {token: -1e9 for token in range(VOCABULARY) if token not in KEPT}


def without(q, tokens):
    """What is left of a distribution when some tokens are gone."""
    left = q.index_fill(0, torch.tensor(tokens, dtype=torch.int64), 0.0)
    return left / left.sum()


class DrawingDrafter(Drafter):
    """Draws from a q that knows nothing of the target, one banned token among its own.

    drawing: `chain` of two, `independent` siblings or `distinct` siblings, three of them.
    """

    draws = True

    def __init__(self, drawing: str, honest: bool = True) -> None:
        self.drawing, self.honest = drawing, honest

    def q(self, depth: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(depth)
        q = torch.zeros(VOCABULARY)
        q[[*KEPT, 30]] = torch.rand(5, generator=g) + 0.1
        return q / q.sum()

    def propose(self, contexts, budgets):
        return [self._one(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def _one(self, context, budget):
        seeds = torch.tensor([context.params.seed])
        length = torch.tensor([len(context.tokens)])
        every = torch.arange(VOCABULARY)[None]

        def noise(number):
            return gumbel_of_tokens(seeds, step_keys(length, length * 0 + number), every, DRAFT)[0]

        if self.drawing == "chain":
            rows = [self.q(d) for d in range(min(2, budget.depth))]
            tokens = [int((q.log() + noise(d)).argmax()) for d, q in enumerate(rows)]
            parents, depth = range(-1, len(rows) - 1), len(rows)
        else:
            rows = [self.q(0)] * (3 if budget.depth else 0)
            parents, depth = [-1] * len(rows), min(1, len(rows))
            if self.drawing == "distinct":
                tokens = (self.q(0).log() + noise(0)).topk(3).indices.tolist()[: len(rows)]
                rows = [without(q, tokens[:i]) for i, q in enumerate(rows)]
            else:
                tokens = [int((q.log() + noise(i)).argmax()) for i, q in enumerate(rows)]
        probs = torch.stack(rows) if rows else torch.zeros(0, VOCABULARY)
        if not self.honest:
            probs = probs.roll(3, 1)
        index = torch.tensor(list(parents), dtype=torch.int64)
        return TextDraft(torch.tensor(tokens, dtype=torch.int64), index, depth, probs)


@pytest.mark.parametrize(
    "rule, drawing",
    [
        pytest.param("sample", "chain", marks=pytest.mark.slow),
        ("rejection", "chain"),
        pytest.param("block", "chain", marks=pytest.mark.slow),
        pytest.param("multi_step", "chain", marks=pytest.mark.slow),
        pytest.param("multi_step", "independent", marks=pytest.mark.slow),
        ("multi_step", "distinct"),
        pytest.param("rejection", "lying", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("texts", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_law_of_the_text(rule, drawing, texts):
    """Chi-square of so many texts of 3 tokens out of 4, alpha = 1e-6; `lying` declares another q
    than it draws from, and must fail. Of few texts only the first two tokens are counted, so that
    enough are expected of each.
    """
    model = drawn_model(1, spread=0.5)
    prompt = np.array([3, 7, 1])
    drafter = DrawingDrafter("chain" if drawing == "lying" else drawing, drawing != "lying")
    engine = build_engine(
        EngineModels(text=model, drafters={"drawn": drafter}),
        EngineConfig(kv_bytes=8 * 2**20, load_aware=False),
    )
    fields = {"max_tokens": 3, "logit_bias": ONLY}
    requests = [
        TextQuery(prompt, SamplingParams(seed=seed, **fields), Speculation("drawn", rule))
        for seed in range(texts)
    ]
    answers = engine.run_many(requests)
    assert sum(a.counts.num_accepted_tokens for a in answers) > texts / 4
    p_value = chance(model, prompt, answers, SamplingParams(**fields))
    assert (p_value < 1e-6) if drawing == "lying" else (p_value > 1e-6)


def chance(model, prompt, answers, params):
    """Returns the p-value of texts by their first 3 tokens; few texts are compared by two."""
    counts, expected = np.zeros((4, 4, 4)), np.zeros((4, 4, 4))
    for answer in answers:
        counts[tuple(KEPT.index(t) for t in answer.tokens[:3])] += 1

    def fill(place, mass):
        tokens = [*prompt.tolist(), *(KEPT[i] for i in place)]
        if len(place) == 3:
            expected[place] = mass
            return
        with torch.inference_mode():
            row = torch.tensor(processed(last_logits(model, tokens), tokens, 3, params))
        p = row.softmax(0)[list(KEPT)]
        for i in range(4):
            fill((*place, i), mass * float(p[i]))

    fill((), len(answers))
    if len(answers) < 1000:
        counts, expected = counts.sum(2), expected.sum(2)
    assert expected.min() > 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return stats.chi2.sf(statistic, counts.size - 1)


class SwellingDrafter(DrawingDrafter):
    """Draws one of two tokens. As many as the budget allows follow the one, and none the other.

    With `multi_step` the first token has a sibling behind them.
    """

    always_draws = True

    def q(self, depth):
        q = torch.zeros(VOCABULARY)
        q[[KEPT[depth % 2], KEPT[3]]] = 0.5
        return q

    def _one(self, context, budget):
        random = torch.Generator().manual_seed(hash((context.params.seed, len(context.tokens))))
        sibling = context.speculation.verifier == "multi_step" and budget.num_nodes > 1
        rows = [self.q(0)][: budget.num_nodes]
        tokens = [int(q.multinomial(1, generator=random)) for q in rows]
        if tokens and tokens[0] in KEPT[:2]:
            deepest = min(budget.depth, budget.num_nodes - sibling)
            rows += [self.q(depth) for depth in range(1, deepest)]
        parents = [*range(-1, len(rows) - 1)]
        depth = len(rows)
        if sibling:
            rows, parents = [*rows, self.q(0)], [*parents, -1]
        tokens += [int(q.multinomial(1, generator=random)) for q in rows[1:]]
        probs = torch.stack(rows) if rows else torch.zeros(0, VOCABULARY)
        index = torch.tensor(parents, dtype=torch.int64)
        return TextDraft(torch.tensor(tokens, dtype=torch.int64), index, depth, probs)


@pytest.mark.parametrize("pool", chosen({"7-4": (7, 4), "4-8": (4, 8)}, "4-8"))
@pytest.mark.parametrize("rule", chosen(["rejection", "multi_step", "block"], "multi_step"))
def test_law_where_pages_are_lacking(rule, pool):
    """Chi-square, alpha = 1e-6. How large a draft is depends on what is drawn, and the pages of the
    pool hold a few texts, but not their large drafts.
    """
    model, prompt = drawn_model(1, spread=0.5), np.array([3, 7, 1])
    params = SamplingParams(max_tokens=20, logit_bias=ONLY)
    engine = engine_for(model, pool[0], {"own": SwellingDrafter("chain")}, pool[1])
    answers = engine.run_many(
        [
            TextQuery(
                prompt,
                replace(params, seed=seed),
                Speculation("own", rule),
                on_commit=until_three_tokens(),
            )
            for seed in range(300)
        ]
    )
    assert sum(a.counts.num_accepted_tokens for a in answers) > 50
    assert chance(model, prompt, answers, params) > 1e-6


def until_three_tokens():
    """Returns a listener that ends a text once it has three tokens."""
    tokens = []

    def listen(commit):
        tokens.extend(commit.tokens)
        return len(tokens) >= 3

    return listen


def test_text_and_recommendations_share_the_engine():
    """Each answer is what it is alone."""
    items, trie = recommender(0, "children")
    model = drawn_model(2)
    prefixes = [history(items, events, events) for events in (2, 5, 9)]
    slates = [SlateQuery(prefix=prefix, trie=trie, k=5, beam_width=10) for prefix in prefixes]
    random = np.random.default_rng(0)
    texts = [
        TextQuery(random.integers(0, VOCABULARY, 6), SamplingParams(seed=i, max_tokens=8))
        for i in range(4)
    ]
    config = EngineConfig(kv_bytes=4 * 2**20, load_aware=False)
    alone = build_engine(EngineModels(items, text=model), config)
    wanted = [alone.run(request) for request in [*slates, *texts]]
    together = build_engine(EngineModels(items, text=model), config)
    futures = [together.submit(request) for request in [*texts, *slates]]
    while together.step():
        pass
    found = [future.result(0) for future in [*futures[4:], *futures[:4]]]
    for ours, other in zip(found[:3], wanted[:3], strict=True):
        assert ours.rows.tolist() == other.rows.tolist()
        np.testing.assert_allclose(ours.scores, other.scores, atol=1e-5)
    assert [a.tokens.tolist() for a in found[3:]] == [a.tokens.tolist() for a in wanted[3:]]
    assert together.stats().running == 0
