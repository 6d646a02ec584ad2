"""Draft models: cached drafts against full forwards, the law of what is drawn, the slots."""

from collections import Counter
from itertools import permutations, product

import pytest
import torch
from scipy import stats

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.draft_model.specinfer import specinfer
from recserve.drafters.none import NoDrafter
from recserve.drafters.shared.rank_tree import expansion_tree
from recserve.kernels.acceptance.noise import DRAFT, gumbel, step_keys
from recserve.kernels.tree import from_parents
from recserve.speculation.draft import Budget
from recserve.speculation.drafter import TextContext
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.grids import chosen, sampled
from tests.support.text_loop import (
    VOCABULARY,
    check_draft,
    generate,
    propose,
    score,
    tiny_model,
    with_node_0,
)

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [5], [7, 8, 9, 10] * 3]
ALPHA = 1e-4


def paths_of(draft) -> list[list[int]]:
    """Node numbers from the top to every node."""
    found: list[list[int]] = []
    for node, parent in enumerate(draft.parents.tolist()):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


def full_logits(model, committed, draft):
    """Logits [1 + n, V] of node 0 and every node, by one forward without a cache."""
    return model.logits(score(model, committed[:-1], with_node_0(committed[-1], draft)))


def committed_before(written, prompt) -> list[list[int]]:
    """Committed tokens when each draft was made."""
    starts, length = [], 0
    for accepted in written.lengths:
        starts.append([*prompt, *written.tokens[:length]])
        length += accepted + 1
    return starts


@pytest.mark.parametrize(
    "expansion,temperature",
    sampled(
        ((1,) * 5, (1, 1, 3, 1, 1), (3, 2, 2)),
        (0.7, 0.0),
        default=("1_1_3_1_1-0.0", "3_2_2-0.7"),
    ),
)
@torch.inference_mode()
def test_chosen_drafts_are_what_full_forwards_choose(expansion, temperature):
    """The k-th child carries the k-th best of logits / temperature and the target's own noise."""
    target, small = tiny_model(), tiny_model()
    for weight in small.parameters():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.25)
    drafter = ModelDrafter(small, VOCABULARY, expansion)
    params = SamplingParams(temperature, seed=11, max_tokens=16)
    shape = expansion_tree(expansion)
    lengths = []
    for prompt, written in zip(
        PROMPTS, generate(target, PROMPTS, params, drafter, num_nodes=40), strict=True
    ):
        lengths += written.lengths
        for committed, draft in zip(committed_before(written, prompt), written.drafts, strict=True):
            logits = full_logits(small, committed, draft)
            tree = shape.within(Budget(40, 15 - (len(committed) - len(prompt))))
            assert tree.parents() == draft.parents.tolist()
            for node, (path, own) in enumerate(zip(tree.paths, paths_of(draft), strict=True)):
                above = own[-2] + 1 if len(own) > 1 else 0
                noisy = logits[above].float()
                if temperature:
                    position = torch.tensor([len(committed) + len(own) - 1])
                    noise = gumbel(torch.tensor([11]), position, VOCABULARY)[0]
                    noisy = noisy / temperature + noise
                ranked = noisy.argsort(descending=True)
                assert int(draft.tokens[node]) == int(ranked[path[-1]])
    assert any(0 < length < len(expansion) for length in lengths), lengths


@pytest.mark.parametrize("rule", chosen(("rejection", "block", "multi_step"), "multi_step"))
@torch.inference_mode()
def test_drawn_drafts_keep_what_they_were_drawn_from(rule):
    target, small = tiny_model(0, sharp=2.0), tiny_model(3, sharp=2.0)
    params = SamplingParams(0.8, top_k=9, seed=5, max_tokens=20)
    drafter = ModelDrafter(small, VOCABULARY, (2, 1, 2))
    for prompt, written in zip(
        PROMPTS, generate(target, PROMPTS, params, drafter, rule), strict=True
    ):
        for committed, draft in zip(committed_before(written, prompt), written.drafts, strict=True):
            if not len(draft):
                continue
            assert (draft.depth == len(draft)) or rule == "multi_step"
            logits = full_logits(small, committed, draft)[draft.parents + 1].float() / 0.8
            kept = logits >= logits.topk(9).values[:, -1:]
            q = logits.masked_fill(~kept, float("-inf")).softmax(1)
            torch.testing.assert_close(draft.probs, q, rtol=1e-5, atol=1e-6)
            depths = torch.tensor([len(path) for path in paths_of(draft)])
            number = torch.empty_like(depths)
            number[depths.argsort(stable=True)] = torch.arange(len(draft)) + 1  # level by level
            keys = step_keys(torch.full_like(number, len(committed)), number)
            noise = gumbel(torch.full_like(number, 5), keys, VOCABULARY, DRAFT)
            assert draft.tokens.tolist() == (q.log() + noise).argmax(1).tolist()


def many(count: int, rule: str = "multi_step", temperature: float = 1.0) -> list[TextContext]:
    params = [SamplingParams(temperature, seed=seed) for seed in range(count)]
    return [
        TextContext(i, [1, 2], 2, own, Speculation("test", rule)) for i, own in enumerate(params)
    ]


def chi_square(counts: Counter, law: dict, total: int) -> float:
    """p value of drawn outcomes against a law; rare outcomes are one."""
    expected = {k: v * total for k, v in law.items() if v * total >= 8}
    observed = [counts[k] for k in expected]
    rest = total - sum(expected.values())
    if rest > 8:
        expected["rest"] = rest
        observed.append(total - sum(observed))
    wanted = [v * sum(observed) / sum(expected.values()) for v in expected.values()]
    return float(stats.chisquare(observed, wanted).pvalue)


@torch.inference_mode()
def test_two_siblings_follow_the_law_of_their_drawing():
    """Chi-square, 1,000 seeds, vocabulary 5, alpha = 1e-4 each; the other drawing's law must fail.

    Independent siblings are a pair of draws; distinct ones a draw and another from what is left.
    Two models' siblings are independent of each other too.
    """
    small = tiny_model(2, vocabulary=5, sharp=1.0)
    contexts = many(1000)
    q = small.logits(score(small, [1], with_node_0(2, NoDrafter().propose([0], [0])[0])))[0]
    q = q.softmax(0).tolist()
    pairs = list(product(range(5), repeat=2))
    independent = {(a, b): q[a] * q[b] for a, b in pairs}
    distinct = {(a, b): q[a] * q[b] / (1 - q[a]) for a, b in permutations(range(5), 2)}
    budgets = [Budget(8, 1)] * len(contexts)
    for name, drafter, law, other in (
        ("one", ModelDrafter(small, 5, (2,)), independent, distinct),
        ("distinct", ModelDrafter(small, 5, (2,), distinct=True), distinct, independent),
        ("two models", specinfer([small, small], 5, (1,)), independent, distinct),
    ):
        drafts = propose(drafter, contexts, budgets)
        assert all(draft.parents.tolist() == [-1, -1] for draft in drafts)
        counts = Counter(tuple(draft.tokens.tolist()) for draft in drafts)
        assert chi_square(counts, law, len(contexts)) > ALPHA, name
        assert name == "distinct" or chi_square(counts, other, len(contexts)) < ALPHA, name
        if name == "distinct":
            assert all(a != b for a, b in counts)


@torch.inference_mode()
def test_siblings_drawn_without_replacement_are_drawn_from_what_is_left():
    """Of one distribution, from which the tokens of the elder ones are gone."""
    small = tiny_model(2)
    params = SamplingParams(0.5, top_k=1, seed=3, max_tokens=8)
    context = TextContext(0, [1, 2], 2, params, Speculation("test", "multi_step"))
    drafter = specinfer([small], VOCABULARY, (4, 2))
    draft = propose(drafter, [context], [Budget(20, 5)])[0]
    check_draft(draft, Budget(20, 5), VOCABULARY)
    assert len(draft) == 12 and bool((draft.probs.gather(1, draft.tokens[:, None]) > 0).all())
    for parent in set(draft.parents.tolist()):
        below = draft.parents == parent
        tokens, rows = draft.tokens[below].tolist(), draft.probs[below]
        assert len(set(tokens)) == len(tokens) and bool((rows[0] > 0).all())
        for number, row in enumerate(rows):
            left = rows[0].index_fill(0, torch.tensor(tokens[:number], dtype=torch.int64), 0.0)
            assert not row[tokens[:number]].any()
            torch.testing.assert_close(row, left / left.sum())


@torch.inference_mode()
def test_a_step_that_was_not_judged_is_drafted_again():
    """Proposals without news, and a text that is set aside and resumed: the drafts stay the same.

    The texts have one token and several; of the only token there are no states to pass on.
    """
    model = tiny_model()
    for tokens in ([1, 2, 3], [4]):
        context = TextContext(0, tokens, 1, SamplingParams(0.0), Speculation("test"))
        drafter = ModelDrafter(model, VOCABULARY, (2, 2, 1))
        first = propose(drafter, [context], [Budget(9, 9)])[0]
        assert len(first) == 9
        again = drafter.propose([context], [Budget(9, 9)])[0]
        drafter.forget(0)
        resumed = propose(drafter, [context], [Budget(9, 9)])[0]
        for draft in (again, resumed):
            assert torch.equal(draft.tokens, first.tokens)
        from_parents(first.tokens, first.parents)


@torch.inference_mode()
def test_contexts_beyond_the_models_positions_are_not_drafted():
    model = tiny_model()
    for length, levels in ((507, 5), (508, 4), (511, 1), (512, 0), (540, 0)):
        context = TextContext(0, [1] * length, 1, SamplingParams(0.0), Speculation("test"))
        drafter = ModelDrafter(model, VOCABULARY, (1,) * 5)
        assert len(propose(drafter, [context], [Budget(9, 9)])[0]) == levels


def test_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="has 29 tokens, the target 31"):
        ModelDrafter(tiny_model(), 31)
    with pytest.raises(ValueError, match="only 29 tokens"):
        ModelDrafter(tiny_model(), 29, (1, 30))
    with pytest.raises(ValueError, match="at least one draft model"):
        specinfer([], 29)
    with pytest.raises(ValueError, match="has 29 tokens, the target 30"):
        specinfer([tiny_model(vocabulary=30), tiny_model()], 30)
