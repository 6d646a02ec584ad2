"""The page that text drafters, acceptance rules and the engine agree on.

The committed tokens of a sequence are prompt and output. Keys and values exist for all of them but
the last, which is node 0 of every step's tree; the draft hangs below it:

    committed ... a b c      tree:  c -+- d --- e
                                       `- f          draft: tokens [d, e, f], parents [-1, 0, -1]

One forward scores all nodes; the logits at a node of depth d predict absolute position
`committed length + d`. A verifier keeps a path from node 0 and one more token drawn from the
target, the bonus token; so a step commits at least one token whatever the draft was.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.kernels.accept_reference import DraftProbs
from recserve.kernels.tree import CANDIDATE, TokenTree
from recserve.speculation.text_request import SamplingParams, Speculation


class UnfitDraft(ValueError):
    """A draft on which the acceptance rule that was asked for would be biased."""


@dataclass(eq=False)
class TextContext:
    """What a drafter sees of a running sequence. The engine keeps it; drafters only read.

    id: unique in the engine's life. tokens: committed, prompt first. hidden [E]: the target's final
    hidden state at `tokens[-2]`, the one whose logits gave `tokens[-1]`; None where it is not known
    (a prompt of one token, or one whose computation shares its forward with the draft). The next
    step may write where it lies. ranked
    [K, W] int64, on the host: tokens that the drafter's heads ranked from `hidden` in the step that
    found it (speculation/ranked_heads.py); None where they did not.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    speculation: Speculation
    hidden: Tensor | None = None
    ranked: NDArray[np.int64] | None = None

    @property
    def num_output(self) -> int:
        """Tokens written so far."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True)
class Budget:
    """Most that a draft may cost: nodes in all (auxiliary ones too), and levels below node 0."""

    num_nodes: int
    depth: int


@lru_cache(maxsize=4096)
def budget_of(num_nodes: int, depth: int) -> Budget:
    """The same object for the same numbers: every text has a budget at every step."""
    return Budget(num_nodes, depth)


@dataclass(frozen=True)
class TextDraft:
    """Proposed tokens of one sequence, below its last committed token; n may be 0.

    tokens [n] int64, parents [n] int64 in depth-first preorder: index of the parent in this draft,
    -1 for a child of the last committed token. depth: the most nodes on a path, a host number so
    that packing needs no synchronisation.
    probs [n, V] float: the distribution each node's token was drawn from, given its parent and the
    siblings before it (without replacement: none of theirs). None for drafts that were chosen, a
    function of what is committed (top-k, lookup), whose siblings should differ.
    kinds [n]: kernels.tree.CANDIDATE or AUXILIARY; None: all CANDIDATE. proposers [n] int64: bit i
    is set where the drafter's i-th source proposed the node; None: it has one source. num_nodes: n.
    Raises ValueError where the columns do not fit each other.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    probs: Tensor | None = None
    kinds: Tensor | None = None
    proposers: Tensor | None = None
    num_nodes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n = self.tokens.shape[0]
        object.__setattr__(self, "num_nodes", n)  # asked for often, and slow to read of a tensor
        bare = self.probs is self.kinds is self.proposers is None
        if not bare or self.parents.shape[0] != n:
            self._check_columns(n)

    def _check_columns(self, n: int) -> None:
        for name in ("parents", "probs", "kinds", "proposers"):
            column = getattr(self, name)
            if column is not None and column.shape[0] != n:
                raise ValueError(f"draft has {n} tokens but {column.shape[0]} {name}")

    def __len__(self) -> int:
        return self.num_nodes

    @property
    def num_candidates(self) -> int:
        """Nodes that may be accepted."""
        kinds = self.kinds
        return self.num_nodes if kinds is None else int((kinds == CANDIDATE).sum())


def chain_draft(tokens: Tensor, probs: Tensor | None = None) -> TextDraft:
    """A draft without forks. tokens [n]; probs [n, V] where they were drawn."""
    n = tokens.shape[0]
    parents = torch.arange(-1, n - 1, device=tokens.device)
    return TextDraft(tokens, parents, n, probs)


@lru_cache
def empty_draft(device: torch.device | str = "cpu") -> TextDraft:
    """The draft that makes a step plain decoding; one for each device."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return TextDraft(nothing, nothing, 0)


@dataclass(frozen=True)
class TextOutcome:
    """What a step did to one sequence, for its drafter.

    context: after the commit. draft: what was scored: the proposal, or an empty draft where there
    was no room for it. accepted: nodes of the draft that were kept, as indices into it, in order.
    tokens: what was committed, the bonus token last. all_hidden [T, E], all_logits [T, V]: of the
    whole step, whose row `first` is node 0; the next step may write where they lie.
    """

    context: TextContext
    draft: TextDraft
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    all_hidden: Tensor
    all_logits: Tensor
    first: int = 0

    @property
    def hidden(self) -> Tensor:
        """[1 + n, E] of the target at node 0 and at every draft node."""
        return self.all_hidden[self.first : self.first + 1 + len(self.draft)]

    @property
    def logits(self) -> Tensor:
        """[1 + n, V] of the target at node 0 and at every draft node, raw."""
        return self.all_logits[self.first : self.first + 1 + len(self.draft)]


class Drafter(Protocol):
    """Proposes tokens for running sequences. One object serves all sequences that name it.

    State per sequence is the drafter's own, keyed by `context.id`; the first `propose` with an id
    starts it from `context.tokens`. Nothing that a drafter does changes the text under an exact
    verifier, so drafts may be as wrong as they like but must keep their budget. The first draft is
    asked for before the prompt is computed; a drafter that needs the hidden state has none then.
    A drafter that draws for a rule other than `sample` says so (`MayDraw`), and keys its noise with
    `kernels.noise.gumbel(seeds, noise.step_keys(lengths, ...), V, DRAFT)`. Under `sample` it
    does better to draw with the target's own noise, `gumbel(seeds, positions, V)`: what it then
    draws from a similar distribution is what the target is about to draw.
    """

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """One draft per context, in order, each within its budget. Called once a step."""
        ...

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """What became of the drafts of the last `propose`; sequences that go on only."""
        ...

    def forget(self, context_id: int) -> None:
        """The sequence ended, or was set aside; if it comes back, it starts from its tokens."""
        ...


@runtime_checkable
class MayDraw(Protocol):
    """A drafter that says whether it draws for rules that compare with q."""

    @property
    def draws(self) -> bool:
        """Whether its drafts may carry probs."""
        ...


def draws(drafter: Drafter) -> bool:
    """Whether drafts of this drafter may carry probs; those that do not say choose."""
    return isinstance(drafter, MayDraw) and drafter.draws


@dataclass(frozen=True)
class ScoredTrees:
    """Drafts of B sequences with what the target says of them: what a verifier decides on.

    tree: B trees; the first node of each is the last committed token, the only one of depth 0.
    depth: most levels below node 0, a host number.
    target: packed nodes [m] -> [m, V] logits with every sampling parameter applied, whose softmax
    is the distribution p of the token after the node; -inf where p is 0, and everywhere but at one
    token at temperature 0.
    probs: q, the distribution each drawn node's token came from. None where all are chosen.
    seeds [B], lengths [B] int64: noise is keyed by the seed; a node of depth d predicts position
    `lengths + d`. greedy: every sequence has temperature 0.
    logits [T, V]: raw, where the target is softmax(logits / temperature) and nothing else, with
    temperatures [B]; None where other parameters count. everywhere: draw at all nodes, so that no
    shape depends on what is drawn and the host is not asked; else only where the path comes by.
    rules [B] int64: numbers of the rules of each, where they differ (rules.py).
    """

    tree: TokenTree
    depth: int
    target: Callable[[Tensor], Tensor]
    seeds: Tensor
    lengths: Tensor
    vocab_size: int
    probs: DraftProbs | None = None
    greedy: bool = False
    logits: Tensor | None = None
    temperatures: Tensor | None = None
    everywhere: bool = False
    rules: Tensor | None = None


@dataclass(frozen=True)
class Accepted:
    """What of B scored trees is kept.

    nodes [B, D + 1]: packed nodes of the kept path, node 0 of the tree first, -1 after its end.
    lengths [B]: drafted tokens kept, node 0 and bonus excluded. bonus [B]: token after the path.
    """

    nodes: Tensor
    lengths: Tensor
    bonus: Tensor


class Verifier(Protocol):
    """An acceptance rule. exact: the text has the target's distribution, whatever was drafted."""

    exact: bool

    def check(self, draft: TextDraft) -> None:
        """Raises UnfitDraft for a draft on which the rule would be biased."""
        ...

    def verify(self, scored: ScoredTrees) -> Accepted:
        """The path that is kept of every tree, and the token after it."""
        ...
