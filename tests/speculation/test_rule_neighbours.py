"""A text's accepted tokens depend neither on other texts of the step nor on how noise is drawn."""

from dataclasses import replace

import pytest
import torch

from recserve.kernels.acceptance.acceptance import DraftProbs
from recserve.kernels.tree import TokenTree, from_parents, merge
from recserve.speculation.sampling_params import SamplingParams
from recserve.speculation.sampling_table import SamplingCapacity, sampling_table
from recserve.speculation.verifier import Accepted, ScoredTrees
from recserve.speculation.verifiers.registry import verify

VOCABULARY, TREES = 5, 12
CHAIN = (-1, 0, 1, 2)
FORK = (-1, 0, 0, 2, 0)
RULES = {"sample": FORK, "multi_step": FORK, "rejection": CHAIN, "block": CHAIN, "typical": FORK}


def drawn_steps(parents) -> list[ScoredTrees]:
    """Returns steps of single trees: near distributions of target and draft, other seeds each."""
    g = torch.Generator().manual_seed(11)
    steps = []
    for number in range(TREES):
        nodes = len(parents)
        tokens = torch.randint(0, VOCABULARY, (nodes,), generator=g)
        logits = torch.randn(nodes, VOCABULARY, generator=g)
        drafted = (logits + 0.5 * torch.randn(nodes, VOCABULARY, generator=g)).softmax(1)
        tree = from_parents(tokens, torch.tensor(parents))
        steps.append(
            ScoredTrees(
                tree,
                int(tree.depths.max()),
                lambda nodes, logits=logits: logits[nodes],
                torch.tensor([100 + number]),
                torch.tensor([7 + 3 * number]),
                VOCABULARY,
                DraftProbs(drafted, torch.arange(nodes)),
            )
        )
    return steps


def together(steps: list[ScoredTrees]) -> ScoredTrees:
    """Returns the same trees as one step."""
    tree: TokenTree = merge([step.tree for step in steps])
    size = len(steps[0].tree.tokens)
    logits = torch.cat([step.target(torch.arange(size)) for step in steps])
    return ScoredTrees(
        tree,
        steps[0].depth,
        lambda nodes: logits[nodes],
        torch.cat([step.seeds for step in steps]),
        torch.cat([step.lengths for step in steps]),
        VOCABULARY,
        DraftProbs(torch.cat([step.probs.values for step in steps]), torch.arange(tree.num_nodes)),
    )


def results(accepted: Accepted, first: int = 0) -> list[tuple[list[int], int, int]]:
    """Returns nodes (counted from `first`), length and bonus token of each tree."""
    rows = [[node - first for node in row if node >= 0] for row in accepted.nodes.tolist()]
    return list(zip(rows, accepted.lengths.tolist(), accepted.bonus.tolist(), strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_a_tree_is_judged_as_it_is_alone(rule):
    steps = drawn_steps(RULES[rule])
    whole = verify(rule, together(steps))
    size = len(RULES[rule])
    expected = [results(verify(rule, step))[0] for step in steps]
    found = [results(whole, number * size)[number] for number in range(TREES)]
    assert found == expected
    lengths = {length for _, length, _ in expected}
    assert len(lengths) > 1, "some tokens are accepted and some are not"


@pytest.mark.parametrize("rule", RULES)
def test_drawing_at_all_nodes_gives_the_same_tokens(rule):
    """Steps with fixed shapes draw everywhere; the others draw along the path."""
    step = together(drawn_steps(RULES[rule]))
    assert results(verify(rule, step)) == results(verify(rule, replace(step, fixed_shapes=True)))


PARAMS = [
    SamplingParams(),
    SamplingParams(logit_bias={3: 1.0, 4: -2.0}, bad_words=((1,), (2, 3))),
    SamplingParams(stop_token_ids=(1, 2), min_tokens=3, bad_words=((4, 1, 2),)),
]


def test_a_table_with_a_capacity_has_the_same_shapes_for_all_parameters():
    """So a captured step can take over the parameters of other texts."""
    capacity = SamplingCapacity(num_entries=6, num_bad_words=4, bad_word_length=3)
    tables = [sampling_table([params], capacity=capacity) for params in PARAMS]
    for table in tables:
        for entries in (table.bias, table.stops):
            assert entries.owners.shape == entries.tokens.shape == entries.values.shape == (6,)
        assert table.bad_words.owners.shape == table.bad_words.last.shape == (4,)
        assert table.bad_words.before.shape == (4, 2)
    target, *others = tables
    for table in others:
        target.copy_(table)
        assert torch.equal(target.bias.values, table.bias.values)
        assert torch.equal(target.bad_words.before, table.bad_words.before)


def test_a_table_without_a_capacity_is_as_long_as_its_parameters():
    table = sampling_table(PARAMS)
    assert table.bias.owners.tolist() == [1, 1] and table.stops.owners.tolist() == [2, 2]
    assert table.bad_words.owners.tolist() == [1, 1, 2]
    assert table.bad_words.before.tolist() == [[-1, -1], [2, -1], [1, 4]]


def test_a_capacity_holds_what_fits_and_no_more():
    capacity = SamplingCapacity(num_entries=2, num_bad_words=2, bad_word_length=3)
    full = SamplingParams(
        logit_bias={1: 1.0, 2: 1.0},
        stop_token_ids=(1, 2),
        min_tokens=1,
        bad_words=((1, 2, 3), (4,)),
    )
    assert capacity.holds([full]) and capacity.holds([full, SamplingParams()])
    for more in (
        {"logit_bias": {1: 1.0}},
        {"stop_token_ids": (1,), "min_tokens": 1},
        {"bad_words": ((1,),)},
    ):
        assert not capacity.holds([full, SamplingParams(**more)])
    assert capacity.holds([full, SamplingParams(stop_token_ids=(1,))]), "they need no entry"
    assert not capacity.holds([SamplingParams(bad_words=((1, 2, 3, 4),))])
