"""Acceptance rules: every outcome with its probability, no statistics; then chi-square end to end.

A plain recursion lists what a rule may do with a draft and how likely each outcome is, and the law
of the written tokens that follows from it must be the target's to 1e-12. The rule's own code is
then run on every one of these outcomes, its coins a hair to either side of the threshold and its
noise tipped to the token by a hair, and must do the same.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from scipy import stats

from recserve.engine.text_trees import TreePacker
from recserve.kernels.acceptance import acceptance
from recserve.kernels.acceptance.acceptance import DraftProbs
from recserve.kernels.acceptance.noise import DRAFT, TARGET, gumbel_of_tokens, step_keys
from recserve.kernels.tree import AUXILIARY, TokenTree, from_parents
from recserve.speculation.draft import TextDraft, chain_draft
from recserve.speculation.sampling_params import SamplingParams
from recserve.speculation.verifier import ScoredTrees
from recserve.speculation.verifiers.block import accept_block
from recserve.speculation.verifiers.path import follow
from recserve.speculation.verifiers.registry import check_rule, verifiers, verify
from recserve.speculation.verifiers.rejection import reject
from recserve.speculation.verifiers.typical import TypicalRule

HAIR = 1e-11
CHAIN = (-1, 0, 1)
PAIRS = (-1, 0, 0, -1, 3)  # two children, the first with two of its own, the second with one
WIDE = (-1, -1, -1)
SHAPES = {"chain": CHAIN, "pairs": PAIRS, "three-siblings": WIDE}


class Tables:
    """Next-token distributions of target and draft after every short context."""

    def __init__(
        self, seed: int, vocabulary: int, sharp: float = 1.5, holes: tuple[int, ...] = (0, 1)
    ) -> None:
        self.vocabulary, self.seed, self.sharp, self.holes = vocabulary, seed, sharp, holes
        self._made: dict = {}

    def _row(self, kind: int, context: tuple[int, ...]) -> torch.Tensor:
        key = (kind, context)
        if key not in self._made:
            number = hash((self.seed, kind, context)) % 2**31
            g = torch.Generator().manual_seed(number)
            logits = torch.randn(self.vocabulary, generator=g, dtype=torch.float64) * self.sharp
            if number % 3 == 0 and kind in self.holes:
                logits[number % self.vocabulary] = float("-inf")
            self._made[key] = logits.softmax(0)
        return self._made[key]

    def p(self, context):
        return self._row(0, context)

    def q(self, context):
        return self._row(1, context)

    def law(self, length: int) -> dict[tuple[int, ...], float]:
        """Probability of every string under the target."""
        out = {}
        for string in product(range(self.vocabulary), repeat=length):
            mass = 1.0
            for i, token in enumerate(string):
                mass *= float(self.p(string[:i])[token])
            out[string] = mass
        return out


@dataclass
class Outcome:
    """One way a step may go: coins by draft node, kept path, and the weights of the next token."""

    mass: float
    tokens: tuple[int, ...]
    path: tuple[int, ...]
    coins: dict
    after: torch.Tensor


def children_of(parents, node):
    return [i for i, parent in enumerate(parents) if parent == node]


def context_of(parents, tokens, node):
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return tuple(reversed(path))


def drafted(tables, parents, tokens, node, drawing):
    """Distribution of a draft node's token, given the nodes before it."""
    if drawing == "chosen":
        sure = torch.zeros(tables.vocabulary, dtype=torch.float64)
        sure[tokens[node]] = 1
        return sure
    row = tables.q(context_of(parents, tokens, parents[node])).clone()
    if drawing == "distinct":
        for elder in children_of(parents, parents[node]):
            if elder < node:
                row[tokens[elder]] = 0
        row = row / row.sum().clamp(min=1e-30)
    return row


def drafts(tables, parents, drawing):
    """Every draft of a shape with its probability."""

    def grow(tokens, mass):
        if len(tokens) == len(parents):
            yield mass, tokens
            return
        for token in range(tables.vocabulary):
            longer = (*tokens, token)
            row = drafted(tables, parents, longer, len(tokens), drawing)
            if row[token] > 0:
                yield from grow(longer, mass * float(row[token]))

    yield from grow((), 1.0)


def rejections(tables, parents, tokens, drawing):
    """Outcomes of trying children one after another."""

    def at(node, left, weights, mass, path, coins):
        if not left:
            yield Outcome(mass, tokens, path, coins, weights)
            return
        child, *rest = left
        q = drafted(tables, parents, tokens, child, drawing)
        token = tokens[child]
        level = min(1.0, float(weights[token] / q[token]))
        if level > 0:
            kept = tables.p(context_of(parents, tokens, child))
            below = coins | {child: level - HAIR}
            yield from at(
                child, children_of(parents, child), kept, mass * level, (*path, child), below
            )
        if level < 1:
            after = (weights - q).clamp(min=0)
            above = coins | {child: level + HAIR}
            yield from at(node, rest, after / after.sum(), mass * (1 - level), path, above)

    yield from at(-1, children_of(parents, -1), tables.p(()), 1.0, (), {})


def blocks(tables, parents, tokens, drawing):
    """Outcomes of block verification of a chain."""
    n = len(tokens)
    share, levels, weights = 1.0, [], []
    for i in range(n + 1):
        p = tables.p(tokens[:i])
        if i:
            q = drafted(tables, parents, tokens, i - 1, drawing)
            share = min(
                1.0, share * float(tables.p(tokens[: i - 1])[tokens[i - 1]]) / q[tokens[i - 1]]
            )
        if i == n:
            levels.append(share)
            weights.append(p)
            break
        rest = (share * p - drafted(tables, parents, tokens, i, drawing)).clamp(min=0)
        mass = float(rest.sum())
        levels.append(mass / (mass + 1 - share) if mass + 1 - share > 0 else 1.0)
        weights.append(rest / mass if mass else p)
    for pattern in product((True, False), repeat=n):
        mass, coins = 1.0, {}
        for i, under in enumerate(pattern):
            level = float(levels[i + 1])
            mass *= level if under else 1 - level
            coins[i] = level - HAIR if under else level + HAIR
        if mass > 0:
            kept = max((i + 1 for i, under in enumerate(pattern) if under), default=0)
            yield Outcome(mass, tokens, tuple(range(kept)), coins, weights[kept])


def pack(tables, parents, cases, drawing):
    """A batch of the same shape with many tokens, and the tables behind it."""
    n = len(parents) + 1
    one = from_parents(
        torch.zeros(n, dtype=torch.int64), torch.tensor([-1, *(p + 1 for p in parents)])
    )
    b = len(cases)
    shift = (torch.arange(b) * n)[:, None]
    tree = TokenTree(
        torch.tensor([[0, *tokens] for tokens in cases]).flatten(),
        torch.where(one.parents >= 0, one.parents + shift, -1).flatten(),
        one.depths.repeat(b),
        (one.ends + shift).flatten(),
        torch.arange(b + 1) * n,
    )
    target, probs = [], []
    for tokens in cases:
        target.append(tables.p(()))
        probs.append(tables.p(()))
        for node in range(len(parents)):
            target.append(tables.p(context_of(parents, tokens, node)))
            probs.append(drafted(tables, parents, tokens, node, drawing))
    logits = torch.stack(target).log()
    return ScoredTrees(
        tree,
        int(tree.depths.max()),
        lambda nodes: logits[nodes],
        torch.arange(b),
        torch.full((b,), 5),
        tables.vocabulary,
        None if drawing == "chosen" else DraftProbs(torch.stack(probs), torch.arange(b * n)),
    )


def run_and_compare(rule, tables, parents, outcomes, drawing):
    """The rule's code does on every outcome what the recursion says."""
    cases = [(o, t) for o in outcomes for t in range(tables.vocabulary) if o.after[t] > 0]
    scored = pack(tables, parents, [o.tokens for o, _ in cases], drawing)
    n = len(parents) + 1
    coins = torch.full((len(cases), n), 0.5, dtype=torch.float64)
    noise = torch.full((len(cases), tables.vocabulary), 50.0, dtype=torch.float64)
    for row, (outcome, token) in enumerate(cases):
        for node, coin in outcome.coins.items():
            coins[row, node + 1] = coin
        likely = outcome.after > 0
        noise[row, likely] = -outcome.after[likely].log()
        noise[row, token] += HAIR * 100
    accepted = rule(scored, coins.flatten(), noise)
    for row, (outcome, token) in enumerate(cases):
        expected = [row * n, *(row * n + 1 + node for node in outcome.path)]
        kept = accepted.nodes[row][: len(expected)].tolist()
        assert kept == expected and int(accepted.lengths[row]) == len(outcome.path)
        assert int(accepted.bonus[row]) == token
        assert (accepted.nodes[row][len(expected) :] == -1).all()


def assert_law(tables, parents, weighted, depth, tolerance=1e-12):
    """The written tokens, followed by plain decoding, have the target's joint distribution."""
    written = defaultdict(float)
    for mass, outcome in weighted:
        path = tuple(outcome.tokens[node] for node in outcome.path)
        for token in range(tables.vocabulary):
            written[(*path, token)] += mass * outcome.mass * float(outcome.after[token])
    assert abs(sum(written.values()) - 1) < tolerance
    worst = 0.0
    for string, mass in tables.law(depth + 1).items():
        total = 0.0
        for end in range(1, depth + 2):
            rest = 1.0
            for i in range(end, depth + 1):
                rest *= float(tables.p(string[:i])[string[i]])
            total += written[string[:end]] * rest
        worst = max(worst, abs(total - mass))
    return worst


def depth_of(parents):
    return max(len(context_of(parents, parents, node)) for node in range(len(parents)))


CASES = [
    ("rejection", "chain", "independent"),
    ("rejection", "chain", "chosen"),
    ("multi_step", "chain", "independent"),
    ("multi_step", "pairs", "independent"),
    ("multi_step", "pairs", "distinct"),
    ("multi_step", "three-siblings", "independent"),
    ("multi_step", "three-siblings", "distinct"),
    ("block", "chain", "independent"),
    ("block", "chain", "chosen"),
]


@pytest.mark.parametrize("rule, shape, drawing", CASES, ids=["-".join(c) for c in CASES])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_outcome(rule, shape, drawing, seed):
    """Duplicate siblings are among the independent draws; tokens of probability 0 are in both
    tables.
    """
    # Three distinct siblings need three tokens to draw.
    holes = (0,) if drawing == "distinct" else (0, 1)
    tables, parents = Tables(seed, 3, holes=holes), SHAPES[shape]
    listing = blocks if rule == "block" else rejections
    code = accept_block if rule == "block" else reject
    if drawing == "chosen":
        for tokens in product(range(3), repeat=len(parents)):
            outcomes = list(listing(tables, parents, tokens, drawing))
            weighted = [(1.0, o) for o in outcomes]
            assert assert_law(tables, parents, weighted, depth_of(parents)) < 1e-12
            run_and_compare(code, tables, parents, outcomes, drawing)
        return
    weighted = [
        (mass, outcome)
        for mass, tokens in drafts(tables, parents, drawing)
        for outcome in listing(tables, parents, tokens, drawing)
    ]
    assert assert_law(tables, parents, weighted, depth_of(parents)) < 1e-12
    run_and_compare(code, tables, parents, [o for _, o in weighted], drawing)


@pytest.mark.parametrize("seed", range(4))
def test_multi_step_on_chosen_children_is_biased(seed):
    """The negative control: the two likeliest tokens of q, judged as if they had been drawn from
    it. The rule refuses such a draft.
    """
    tables, parents = Tables(seed, 4), (-1, -1)
    best = tuple(tables.q(()).topk(2).indices.tolist())
    weighted = [(1.0, o) for o in rejections(tables, parents, best, "independent")]
    assert assert_law(tables, parents, weighted, 1) > 1e-3
    index = torch.tensor([-1, -1])
    with pytest.raises(ValueError, match="biased"):
        verifiers()["multi_step"].check(TextDraft(torch.tensor(best), index, 1))


def test_a_wrong_q_is_noticed():
    """Declared q differs from the q that drew: the law must be off."""
    tables, other = Tables(0, 3), Tables(0, 3)
    other._made = {k: v.flip(0) if k[0] else v for k, v in tables._made.items()}
    for tokens in product(range(3), repeat=2):
        other._made[(1, tokens)] = tables.q(tokens).flip(0)
        other._made[(1, tokens[:1])] = tables.q(tokens[:1]).flip(0)
    other._made[(1, ())] = tables.q(()).flip(0)
    for listing in (rejections, blocks):
        weighted = [
            (mass, outcome)
            for mass, tokens in drafts(tables, CHAIN, "independent")
            for outcome in listing(other, CHAIN, tokens, "independent")
        ]
        assert assert_law(tables, CHAIN, weighted, 3) > 1e-3


@pytest.mark.parametrize("shape", [(), (-1,), CHAIN, PAIRS, (-1, -1, -1), (-1, 0, -1, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_sample_and_walk(shape, seed):
    """All drafts of a shape, duplicates among siblings too: whatever is drawn is what is written,
    and the path goes on exactly while a child carries it.
    """
    tables = Tables(seed, 3)
    every = list(product(range(3), repeat=len(shape)))
    for tokens in every[:: max(len(every) // 12, 1)]:
        outcomes = []

        def at(node, mass, path, draws, tokens=tokens, outcomes=outcomes):
            p = tables.p(context_of(shape, tokens, node))
            for token in range(3):
                if p[token] == 0:
                    continue
                here = draws | {node: token}
                fits = [c for c in children_of(shape, node) if tokens[c] == token]
                if fits:
                    at(fits[0], mass * float(p[token]), (*path, fits[0]), here)
                else:
                    sure = torch.zeros(3, dtype=torch.float64)
                    sure[token] = 1
                    outcomes.append(Outcome(mass * float(p[token]), tokens, path, here, sure))

        at(-1, 1.0, (), {})
        depth = depth_of(shape) if shape else 0
        assert assert_law(tables, shape, [(1.0, o) for o in outcomes], depth) < 1e-12
        scored = pack(tables, shape, [tokens] * len(outcomes), "chosen")
        n = len(shape) + 1
        drawn = torch.zeros(len(outcomes), n, dtype=torch.int64)
        for row, outcome in enumerate(outcomes):
            for node, token in outcome.coins.items():
                drawn[row, node + 1] = token
        flat = drawn.flatten()
        accepted = follow(scored, lambda nodes, trees, flat=flat: flat[nodes])
        for row, outcome in enumerate(outcomes):
            assert accepted.nodes[row][1 : len(outcome.path) + 1].tolist() == [
                row * n + 1 + node for node in outcome.path
            ]
            assert int(accepted.lengths[row]) == len(outcome.path)
            assert int(accepted.bonus[row]) == int(outcome.after.argmax())


def scored_of(tokens, parents, logits, kinds=None, greedy=False):
    tree = from_parents(torch.tensor(tokens), torch.tensor(parents))
    if kinds is not None:
        tree = TokenTree(*list(vars(tree).values())[:5], kinds=torch.tensor(kinds))
    return ScoredTrees(
        tree,
        int(tree.depths.max()),
        lambda nodes: logits[nodes],
        torch.tensor([3]),
        torch.tensor([7]),
        logits.shape[1],
        greedy=greedy,
    )


def rows(*best, vocabulary=6):
    """Logits whose argmaxes are the given tokens."""
    out = torch.zeros(len(best), vocabulary)
    out[torch.arange(len(best)), list(best)] = 9.0
    return out


def test_greedy_stories():
    """Draft 5 -+- 1 - 2; the target says 1 after 5, 3 after 1: one accepted, then 3.
    `- 4
    """
    scored = scored_of([5, 1, 2, 4], [-1, 0, 1, 0], rows(1, 3, 0, 0), greedy=True)
    accepted = verify("sample", scored)
    assert accepted.nodes.tolist() == [[0, 1, -1]]
    assert (accepted.lengths.tolist(), accepted.bonus.tolist()) == ([1], [3])
    scored = scored_of([5, 1, 2, 4], [-1, 0, 1, 0], rows(4, 3, 0, 2), greedy=True)
    accepted = verify("greedy", scored)
    assert accepted.nodes.tolist() == [[0, 3, -1]] and accepted.bonus.tolist() == [2]


def drawn_draft(g: torch.Generator, kinds: bool) -> TextDraft:
    """Tokens 0..2, so that siblings are often equal and paths are long."""

    def number(n: int) -> int:
        return int(torch.randint(0, n, (1,), generator=g))

    parents, depths = [], []
    for node in range(number(9)):
        parent = node - 1
        while parent >= 0 and not number(3):
            parent = parents[parent]
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    n = len(parents)
    tokens = torch.randint(0, 3, (n,), generator=g)
    named = torch.randint(0, 3, (n,), generator=g) // 2 * AUXILIARY if kinds else None
    return TextDraft(
        tokens, torch.tensor(parents, dtype=torch.int64), max(depths, default=0), kinds=named
    )


@pytest.mark.parametrize("kinds", [False, True], ids=["candidates", "kinds"])
def test_the_walk_on_the_host_is_the_walk_on_the_device(kinds):
    """Of several trees in one batch, forks, equal siblings, auxiliary nodes and empty drafts."""
    g = torch.Generator().manual_seed(3)
    longest = 0
    for _ in range(300):
        drafts = [drawn_draft(g, kinds) for _ in range(3)]
        tree = TreePacker("cpu")([0, 1, 2], drafts)
        depth = max(draft.depth for draft in drafts)
        chosen = torch.randint(0, 3, (tree.num_nodes,), generator=g)
        scored = ScoredTrees(tree, depth, chosen, *[torch.zeros(3)] * 2, 3)
        walks = (
            acceptance.follow(chosen, tree, depth),
            follow(scored, lambda nodes, _, c=chosen: c[nodes]),
        )
        for name in ("nodes", "lengths", "bonus"):
            assert torch.equal(getattr(walks[0], name), getattr(walks[1], name))
        # Greedy texts follow logits, in C where there is a compiler.
        logits = torch.zeros(tree.num_nodes, 3).scatter_(1, chosen[:, None], 1.0)
        found = acceptance.greedy_paths(logits, tree, depth)
        wanted = torch.cat(
            [walks[0].nodes, walks[0].lengths[:, None], walks[0].bonus[:, None]], dim=1
        )
        assert torch.equal(found[:, : depth + 3], wanted)
        longest = max(longest, int(walks[0].lengths.max()) + 1)
    assert longest >= 4


def test_auxiliary_nodes_are_never_accepted():
    logits = rows(1, 2, 0)
    kinds = [0, AUXILIARY, 0]
    for rule in ("sample", "typical"):
        accepted = verify(rule, scored_of([5, 1, 1], [-1, 0, 0], logits * 10, kinds))
        assert accepted.nodes.tolist() == [[0, 2]] and accepted.lengths.tolist() == [1]


def test_typical_keeps_what_is_plausible():
    """p = .5 .3 .2 at every node, entropy 1.03: the bound is min(.09, .3 * .357) = .09; a token of
    .05 is out. The longest path wins, then the likeliest.
    """
    p = torch.tensor([0.5, 0.29, 0.16, 0.05]).log()
    logits = p.expand(7, 4)
    accepted = verify("typical", scored_of([0, 3, 2, 1, 0, 2, 1], [-1, 0, 0, 2, 0, 4, 4], logits))
    assert accepted.nodes.tolist() == [[0, 4, 6]]
    assert not TypicalRule().exact
    assert verify("typical", scored_of([0, 3], [-1, 0], logits[:2])).lengths.tolist() == [0]


def test_rules_refuse_what_they_cannot_judge():
    fork = TextDraft(torch.tensor([1, 2]), torch.tensor([-1, -1]), 1)
    for name in ("rejection", "block"):
        with pytest.raises(ValueError, match="chain"):
            verifiers()[name].check(fork)
        verifiers()[name].check(chain_draft(torch.tensor([1, 2])))
    with pytest.raises(ValueError, match="temperature 0, not 1"):
        check_rule("greedy", SamplingParams(temperature=1.0))
    with pytest.raises(ValueError, match="'best'; choose one of"):
        check_rule("best", SamplingParams())
    with pytest.raises(ValueError, match="probs"):
        TextDraft(torch.tensor([1]), torch.tensor([-1]), 1, torch.ones(2, 3))


@pytest.mark.parametrize(
    "rule",
    ["sample", "rejection", "block", "multi_step", pytest.param("wrong", marks=pytest.mark.slow)],
)
def test_whole_steps_have_the_target_s_law(rule):
    """Chi-square, 1,500 texts of 3 tokens over a vocabulary of 3, alpha = 1e-6: drafts drawn with
    keyed noise, steps repeated until enough is written. `wrong` draws its drafts with the noise
    that decides about them, and must fail.
    """
    texts, vocabulary, length = 1_500, 3, 3
    tables = Tables(5, vocabulary, sharp=0.7)
    contexts = [c for n in range(9) for c in product(range(vocabulary), repeat=n)]
    number = {c: i for i, c in enumerate(contexts)}
    table_p = torch.stack([tables.p(c[-3:]) for c in contexts]).log()
    table_q = torch.stack([tables.q(c[-3:]) for c in contexts]).log()
    law = defaultdict(float)
    for string in product(range(vocabulary), repeat=length):
        mass = 1.0
        for i, token in enumerate(string):
            mass *= float(tables.p(string[max(i - 3, 0) : i])[token])
        law[string] = mass
    state = torch.zeros(texts, dtype=torch.int64)
    written = torch.zeros(texts, dtype=torch.int64)
    seeds = torch.arange(texts)
    follow_up = torch.tensor(
        [[number.get((*c, t), 0) for t in range(vocabulary)] for c in contexts]
    )
    every = torch.arange(vocabulary)
    parents = (-1, -1) if rule == "multi_step" else (-1, 0)
    first = torch.full((texts, 8), -1)
    for _ in range(length):
        rows = (written < length).nonzero()[:, 0]
        own, at, n = seeds[rows], state[rows], written[rows]
        tokens, probs = [], []
        after = at
        for node in range(2):
            place = at if parents[node] < 0 else after
            key = step_keys(n, torch.full_like(n, node))
            stream = DRAFT
            if rule == "wrong":
                key, stream = n + node, TARGET
            noise = gumbel_of_tokens(own, key, every.expand(len(own), -1), stream)
            drawn = (table_q[place] + noise).argmax(1)
            tokens.append(drawn)
            probs.append(table_q[place].exp())
            after = follow_up[place, drawn]
        b = rows.shape[0]
        node_0 = torch.arange(b) * 3
        shift = node_0[:, None]
        one = from_parents(torch.zeros(3, dtype=torch.int64), torch.tensor([-1, 0, parents[1] + 1]))
        tree = TokenTree(
            torch.stack([torch.zeros_like(at), *tokens], 1).flatten(),
            torch.where(one.parents >= 0, one.parents + shift, -1).flatten(),
            one.depths.repeat(b),
            (one.ends + shift).flatten(),
            torch.arange(b + 1) * 3,
        )
        below = follow_up[at, tokens[0]]
        second = follow_up[at if parents[1] < 0 else below, tokens[1]]
        logits = table_p[torch.stack([at, below, second], 1).flatten()]
        all_probs = torch.stack([probs[0], probs[0], probs[1]], 1).flatten(0, 1)
        scored = ScoredTrees(
            tree,
            int(tree.depths.max()),
            lambda nodes, logits=logits: logits[nodes],
            own,
            n,
            vocabulary,
            DraftProbs(all_probs, torch.arange(b * 3)),
        )
        if rule == "wrong":
            noise = gumbel_of_tokens(own, n, every.expand(b, -1))
            coins = torch.linspace(0, 1, b * 3)
            accepted = reject(scored, coins, noise)
        else:
            accepted = verify(rule, scored)
        path = torch.where(accepted.nodes >= 0, tree.tokens[accepted.nodes.clamp(min=0)], -1)[:, 1:]
        for column in range(path.shape[1] + 1):
            lengths = accepted.lengths
            token = torch.where(
                lengths == column,
                accepted.bonus,
                path[:, column] if column < path.shape[1] else -1,
            )
            live = column <= lengths
            first[rows[live], written[rows[live]]] = token[live]
            state[rows[live]] = follow_up[state[rows[live]], token[live]]
            written[rows[live]] += 1
    weights = vocabulary ** torch.arange(length - 1, -1, -1)
    counts = torch.bincount((first[:, :length] * weights).sum(1), minlength=vocabulary**length)
    expected = torch.tensor([law[s] for s in product(range(vocabulary), repeat=length)]) * texts
    possible = expected > 0
    assert rule == "wrong" or not counts[~possible].any()
    p_value = stats.chisquare(
        counts[possible].numpy(), expected[possible].numpy() * counts[possible].sum().item() / texts
    ).pvalue
    assert (p_value < 1e-6) if rule == "wrong" else (p_value > 1e-6)
