"""R14: accepted and resampled tokens have the target's distribution."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import Site
from recserve.kernels.accept_reference import DraftProbs
from recserve.kernels.tree import TokenTree
from recserve.speculation.verifier import ScoredTrees
from recserve.speculation.verifiers.block import accept_block
from recserve.speculation.verifiers.rejection import reject

VOCABULARY, SAMPLES = 8, 20_000
SHAPES = ("chain", "siblings", "block")
PAIRS = 200
ALPHA = 1e-3
Probs = torch.Tensor


def pair(number: int, random: np.random.Generator) -> tuple[Probs, Probs]:
    """Returns [V] distributions of target and draft; every fifth pair is a special one."""
    p, q = (torch.from_numpy(random.dirichlet(np.full(VOCABULARY, 0.5))) for _ in range(2))
    half = torch.arange(VOCABULARY) < VOCABULARY // 2
    match number % 10:
        case 0:
            q = p.clone()
        case 2:
            p, q = p * half, q * ~half  # disjoint
        case 4:
            p = torch.zeros_like(p).index_fill(0, torch.tensor([3]), 1.0)
        case 6:
            q = torch.zeros_like(q).index_fill(0, torch.tensor([5]), 1.0)
        case 8:
            p = p * (torch.arange(VOCABULARY) % 3 > 0)
    return p / p.sum(), q / q.sum()


def first_tokens(shape: str, p: Probs, q: Probs, drawn: Probs, seed: int) -> torch.Tensor:
    """Returns the first written token of each of SAMPLES steps.

    Args:
        shape: One draft token (`chain`, `block`), or two draws from q beside each other.
        p: [V] target.
        q: [V] draft, as the rule is told.
        drawn: [V] distribution that the draft tokens really come from.
        seed: Seed of tokens, coins and noise.
    """
    g = torch.Generator().manual_seed(seed)
    width = 2 if shape == "siblings" else 1
    n = 1 + width
    tokens = torch.multinomial(drawn, SAMPLES * width, replacement=True, generator=g)
    root = torch.zeros(SAMPLES, 1, dtype=torch.int64)
    shift = torch.arange(SAMPLES)[:, None] * n
    parents = torch.cat([root - 1, shift.expand(-1, width)], 1)
    ends = shift + torch.tensor([[n, *range(2, n + 1)]])
    tree = TokenTree(
        torch.cat([root, tokens.view(SAMPLES, width)], 1).flatten(),
        parents.flatten(),
        torch.tensor([0] + [1] * width).repeat(SAMPLES),
        ends.flatten(),
        torch.arange(SAMPLES + 1) * n,
    )
    logits = p.log().expand(SAMPLES * n, -1)
    scored = ScoredTrees(
        tree,
        1,
        lambda nodes: logits[nodes],
        torch.arange(SAMPLES),
        torch.full((SAMPLES,), 5),
        VOCABULARY,
        DraftProbs(q.expand(SAMPLES * n, -1), torch.arange(SAMPLES * n)),
    )
    coins = torch.rand(SAMPLES * n, generator=g, dtype=torch.float64)
    uniform = torch.rand(SAMPLES, VOCABULARY, generator=g, dtype=torch.float64)
    noise = -(-uniform.clamp(min=1e-300).log()).log()
    accepted = (accept_block if shape == "block" else reject)(scored, coins, noise)
    kept = tree.tokens[accepted.nodes[:, 1].clamp(min=0)]
    return torch.where(accepted.lengths > 0, kept, accepted.bonus)


def p_value(tokens: torch.Tensor, p: Probs) -> tuple[float, int]:
    """Returns the G-test's p-value and the number of tokens of probability 0."""
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    impossible = int(counts[p == 0].sum())
    likely = (p * SAMPLES >= 5).numpy()
    seen, expected = counts.numpy(), p.numpy() * SAMPLES
    # Rare tokens count together; a single cell has nothing to test.
    seen = np.append(seen[likely], seen[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum())
    if expected[-1] < 5:
        seen, expected = seen[:-1], expected[:-1] * (seen[:-1].sum() / expected[:-1].sum())
    if len(seen) < 2:
        return 1.0, impossible
    found = stats.power_divergence(seen, expected, lambda_="log-likelihood")
    return float(found.pvalue), impossible


@check(
    "R14",
    "sampling law",
    "acceptance rules on pairs of target and draft",
    cases=200_000_000,
    minimum_s=4,
)
def law(site: Site, budget: Budget) -> Finding:
    """Tests the written tokens of both rules; a rule that is told another q must be found."""
    random = np.random.default_rng(site.seed)
    values: list[float] = []
    impossible, samples = 0, 0
    for number in budget.cases(200_000_000 // SAMPLES, 0.85, 60):
        p, q = pair(number % PAIRS, random)
        seed = int(random.integers(2**31))
        value, wrong = p_value(first_tokens(SHAPES[number % 3], p, q, q, seed), p)
        values.append(value)
        impossible += wrong
        samples += SAMPLES
    missed = 0
    for shape in SHAPES:
        p, q = pair(1, np.random.default_rng(7))
        value, _ = p_value(first_tokens(shape, p, q, q.roll(3), 1), p)
        missed += value > 1e-9
    smallest = min(1.0, min(values) * len(values))  # Holm's first step
    return Finding(
        samples,
        (
            Figure("smallest p of the G-tests, Holm", smallest, ALPHA, at_least=True),
            Figure("tokens of probability 0", impossible, 0),
            Figure("mutants that are not found", missed, 0),
        ),
        f"{len(values)} tests of {SAMPLES} tokens, vocabulary {VOCABULARY}: chains, two siblings "
        "and block verification; a sound rule misses the bound in 0.1 % of the campaigns",
    )
