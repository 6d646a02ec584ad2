"""Acceptance in Triton, interpreted on the CPU, against its torch twin: equal."""

from dataclasses import replace

import pytest
import torch

from tests.support import triton_interpreter
from tests.support.accept_cases import CASES, draw
from tests.support.grids import chosen, covering

triton = pytest.importorskip("triton")

from recserve.kernels.acceptance import (  # noqa: E402
    acceptance,  # noqa: E402
    noise,  # noqa: E402
    triton_accept,
    triton_accept_drawn,
)
from recserve.kernels.acceptance.acceptance import DraftProbs, Keys  # noqa: E402
from recserve.kernels.tree import from_parents, merge  # noqa: E402
from recserve.speculation.verifier import ScoredTrees  # noqa: E402
from recserve.speculation.verifiers.registry import verify  # noqa: E402

KINDS = {"all-candidates": False, "some-auxiliary": True}


def poison(monkeypatch):
    """Every output starts as NaN or as a number that no result has."""
    empty = torch.empty

    def poisoned(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)


def assert_same(got, expected):
    for name in ("nodes", "lengths", "bonus"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


@pytest.mark.parametrize("case, kinds", covering(CASES, KINDS))
def test_walk_matches_reference(case, kinds, monkeypatch):
    sizes, vocabulary = case
    monkeypatch.setattr(triton_accept, "BLOCK_NODES", 16)
    monkeypatch.setattr(triton_accept, "BLOCK_TILES", 1)
    tree, logits, keys, temperatures = draw(sizes, vocabulary, 3, kinds)
    depth = int(tree.depths.max())
    expected = acceptance.accept_reference(logits, tree, keys, temperatures, depth)
    poison(monkeypatch)
    assert_same(triton_accept.accept(logits, tree, keys, temperatures, depth), expected)


def test_ties_go_to_the_lowest_token(monkeypatch):
    monkeypatch.setattr(triton_accept, "BLOCK_TILES", 1)
    tree, logits, keys, temperatures = draw((5, 3), 2500, 0)
    logits.zero_()
    logits[:, [300, 1400, 2400]] = 1.0
    walk = triton_accept.accept(logits, tree, keys, temperatures * 0, 4)
    assert walk.bonus.tolist() == [300, 300]


def check_drawn(p, q, tree, keys, monkeypatch, rows=None):
    """q: of every node, or of those of `rows`; None: all were chosen."""
    depth = int(tree.depths.max())
    rows = torch.arange(tree.num_nodes) if rows is None else rows
    q = DraftProbs.none(tree, p.shape[1]) if q is None else DraftProbs(q, rows)
    expected = acceptance.accept_drawn_reference(p, q, tree, keys, depth)
    with monkeypatch.context() as patch:
        poison(patch)
        assert_same(triton_accept_drawn.accept_drawn(p, q, tree, keys, depth), expected)
    return expected


@pytest.mark.parametrize("case, kinds", covering([*CASES, ((3, 2), 2500)], KINDS))
def test_rejection_matches_reference(case, kinds, monkeypatch):
    sizes, vocabulary = case
    tree, logits, keys, _ = draw(sizes, vocabulary, 4, kinds)
    p = logits.softmax(-1)
    q = (logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).softmax(-1)
    check_drawn(p, q, tree, keys, monkeypatch)
    check_drawn(p, None, tree, keys, monkeypatch)
    some = torch.arange(tree.num_nodes) % 3
    check_drawn(p, q[:2], tree, keys, monkeypatch, rows=some - 1)


@pytest.mark.parametrize("drawn", chosen({"drawn": True, "chosen": False}, "drawn"))
def test_several_refusals_at_one_node(drawn, monkeypatch):
    """Seven children, each of a distribution of its own, that are nearly always refused."""
    refused = 0
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        parents = torch.tensor([-1] + [0] * 7)
        p, q = (5 * torch.randn(2, 13, 1030, generator=g)).softmax(-1)
        tokens = torch.multinomial(q[:8], 1, generator=g)[:, 0]
        tree = merge([from_parents(tokens, parents), from_parents(tokens[:5], parents[:5])])
        keys = Keys(torch.tensor([seed, -seed]), torch.tensor([5, 2**33]))
        walk = check_drawn(p, q if drawn else None, tree, keys, monkeypatch)
        refused += int((walk.lengths == 0).sum())
    assert refused > 2


def test_what_is_left_after_refusals_depends_on_the_row_of_each_child(monkeypatch):
    """Twenty trees of five children over few tokens, of two rows or chosen."""
    g = torch.Generator().manual_seed(0)
    parents = torch.tensor([-1] + [0] * 5)
    p, q = (1.5 * torch.randn(2, 120, 7, generator=g)).softmax(-1)
    rows = torch.randint(-1, 2, (120,), generator=g)
    drawn = torch.multinomial(q[rows.clamp(min=0)], 1, generator=g)[:, 0]
    tree = merge([from_parents(tokens, parents) for tokens in drawn.split(6)])
    keys = Keys(torch.arange(20), torch.arange(20) + 3)
    walk = check_drawn(p, q[:2], tree, keys, monkeypatch, rows=rows)
    assert 2 < int((walk.lengths == 0).sum()) < 18


def test_a_refusal_says_nothing_where_p_is_q(monkeypatch):
    """The coins of these seeds refuse what is all of p: it is drawn from p again."""
    q = torch.zeros(6, 9)
    q[:, 4] = 1.0
    p = q * (1 - 2**-24)  # as rounding may leave it, so that a coin near 1 refuses
    p[:, 2] = 0.0
    tree = from_parents(torch.tensor([0, 4, 4, 4, 4, 4]), torch.tensor([-1, 0, 0, 0, 0, 0]))
    lower = p.clone()
    lower[0] = 0.0
    lower[0, 4] = 1e-3  # refused nearly always, and nothing is left: p again
    for seed in range(5):
        keys = Keys(torch.tensor([seed]), torch.tensor([1]))
        check_drawn(lower, q, tree, keys, monkeypatch)


@pytest.mark.parametrize("rule,drawings", [
    pytest.param("rejection", ("independent",) * 3, marks=pytest.mark.slow),
    pytest.param("rejection", ("chosen",) * 3, marks=pytest.mark.slow),
    ("rejection", ("independent", "chosen", "independent")),
    ("multi_step", ("independent",) * 3),
])  # fmt: skip
def test_rules_on_a_device_call_the_kernel_and_keep_what_the_host_keeps(
    rule, drawings, monkeypatch, force_kernels
):
    """Chains, and trees of several children, over 1,100 tokens; 4 seeds of the noise."""
    force_kernels("triton")
    called = []
    kernel = triton_accept_drawn.accept_drawn
    monkeypatch.setattr(
        triton_accept_drawn, "accept_drawn", lambda *args: called.append(args[1]) or kernel(*args)
    )
    g = torch.Generator().manual_seed(0)
    parents = [-1, 0, 1, 2] if rule == "rejection" else [-1, 0, 1, 0, 3, 0]
    size, vocabulary, kept = len(parents), 1100, 0
    for seed in range(4):
        q = (4 * torch.randn(3 * size, vocabulary, generator=g)).softmax(-1)
        drawn = torch.multinomial(q, 1, generator=g)[:, 0]
        trees = [from_parents(row, torch.tensor(parents)) for row in drawn.split(size)]
        tree = merge(trees)
        # The drafted tokens are likely, so that some children are kept and others refused.
        below = tree.parents >= 0
        logits = 2 * torch.randn(3 * size, vocabulary, generator=g)
        logits[tree.parents[below], tree.tokens[below]] += 6.0
        probs = None
        if "independent" in drawings:
            owners = [d == "independent" for d in drawings for _ in range(size)]
            rows = torch.where(torch.tensor(owners), torch.arange(3 * size), -1)
            probs = DraftProbs(q, rows)
        scored = ScoredTrees(
            tree, 3, lambda nodes, rows=logits: rows[nodes], torch.arange(3) + 3 * seed,
            torch.tensor([4, 9, 2**20]), vocabulary, probs,
        )  # fmt: skip
        expected = verify(rule, scored)
        assert len(called) == seed
        assert_same(verify(rule, replace(scored, fixed_shapes=True)), expected)
        kept += int(expected.lengths.sum())
    assert len(called) == 4 and 0 < kept < 4 * 3 * 3
    assert all(bool((q.rows < 0).all()) == (set(drawings) == {"chosen"}) for q in called)


VOCABULARY, NODES = 1500, 6
SHIFT = 2**31 // VOCABULARY + 3  # rows before the first that is there


@pytest.fixture
def far(monkeypatch):
    """A tensor whose row `SHIFT` is its first: all of them together hold more than 2**31 numbers.

    Outputs are poisoned already.
    """

    def moved(tensor):
        row = tensor[0].numel() if tensor.ndim else 1
        return triton_interpreter.Far(tensor, SHIFT * row, monkeypatch)

    return moved


def poisoned(*sizes):
    return torch.full(sizes, float("nan"))


def far_tree(tree, far):
    """Its columns as at nodes SHIFT and on."""
    return far(tree.tokens), far(tree.ends + SHIFT), torch.tensor([SHIFT, SHIFT + NODES])


def test_logits_past_2_31_elements_are_addressed(far, monkeypatch):
    tree, logits, keys, temperatures = draw((NODES,), VOCABULARY, 1)
    expected = acceptance.accept_reference(logits, tree, keys, temperatures, 5)
    values, choices = poisoned(NODES, 2), torch.full((NODES, 2), -(2**30), dtype=torch.int32)
    with monkeypatch.context() as patch:
        triton_interpreter.start_programs_at(SHIFT, patch)
        triton_accept.choose_kernel[NODES, 2](
            far(logits), keys.seeds, far(keys.positions(tree)), far(tree.tree_ids()), temperatures,
            far(values), far(choices), VOCABULARY, 1, LANES=noise.LANES, TILE=noise.TILE,
        )  # fmt: skip
    walk = triton_accept.empty_walk(1, 5, logits.device)
    tokens, ends, offsets = far_tree(tree, far)
    parents = far(torch.where(tree.parents < 0, -1, tree.parents + SHIFT))
    triton_accept.walk_kernel[(1,)](
        far(values), far(choices), tokens, parents, ends, parents, offsets,
        walk.nodes, walk.lengths, walk.bonus, 2, 5,
        BLOCK_SPLITS=2, BLOCK_NODES=16, HAS_KINDS=False,
    )  # fmt: skip
    walk.nodes[walk.nodes >= 0] -= SHIFT
    assert_same(walk, expected)
    assert int(expected.lengths) > 0


@pytest.mark.parametrize("seed", chosen(range(4), "0"))
def test_probabilities_past_2_31_elements_are_addressed(seed, far, monkeypatch):
    tree, logits, keys, _ = draw((NODES,), VOCABULARY, seed)
    p, q = logits.softmax(-1), (logits * 0.5).softmax(-1)
    rows = torch.arange(NODES)
    expected = acceptance.accept_drawn_reference(p, DraftProbs(q, rows), tree, keys, 5)
    tokens, ends, offsets = far_tree(tree, far)
    walk = triton_accept.empty_walk(1, 5, p.device)
    residuals, refusals, totals = poisoned(1, VOCABULARY), torch.tensor([0]), poisoned(1)
    keyed, rows = (keys.seeds, keys.prefix_lengths), far(rows + SHIFT)
    triton_accept_drawn.drawn_walk_kernel[(1,)](
        far(p), far(q), rows, residuals, tokens, ends, ends, *keyed, offsets,
        walk.nodes, walk.lengths, refusals, totals, VOCABULARY, 5,
        TILE=noise.TILE, HAS_KINDS=False,
    )  # fmt: skip
    values, choices = poisoned(2, 2), torch.zeros(2, 2, dtype=torch.int32)
    triton_accept_drawn.bonus_kernel[1, 2](
        far(p), far(q), rows, residuals, tokens, *keyed, walk.nodes, walk.lengths, refusals,
        totals, values, choices, VOCABULARY, 5, 1, LANES=noise.LANES, TILE=noise.TILE,
    )  # fmt: skip
    triton_accept_drawn.pick_kernel[(1,)](values, choices, walk.bonus, 2, BLOCK_SPLITS=2)
    walk.nodes[walk.nodes >= 0] -= SHIFT
    assert_same(walk, expected)
