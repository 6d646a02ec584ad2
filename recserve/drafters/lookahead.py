"""Lookahead decoding: the target drafts for itself, several positions of a window at once.

    last -+- 0,1 - 0,2 - 0,3      row 0 is a chain of W - 1 guesses behind the last token;
          |   |     |     |       a node below another one guesses the position after it,
         1,0 1,1   1,2   1,3      from its own column (Jacobi iteration); rows 0 .. N - 2
          |   |     |     |
         2,0 2,1   2,2   2,3

Window nodes are auxiliary. In every step the last row's logits give the next row. The columns give
n-grams of N tokens, which go into a pool. The drafter proposes the pool's n-grams that begin with
the last token. After a fully accepted n-gram the engine also draws a bonus token; the original
does not.

Source: Fu et al. 2024 (arXiv 2402.02057), section 3 and its reference implementation's window.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from recserve.drafters.shared.draft_tree import ROOT, DraftTree
from recserve.drafters.shared.limits import limit_budget, only_chains
from recserve.kernels.acceptance.noise import DRAFT, uniform
from recserve.kernels.host import on_device
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext, TextOutcome


class NgramPool:
    """N-grams by their first token, the most recently used ones.

    Args:
        guesses: Most n-grams per first token.
        capacity: Most first tokens.
    """

    def __init__(self, guesses: int, capacity: int) -> None:
        self.guesses, self.capacity = guesses, capacity
        self._rows: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """Adds an n-gram, or marks it as the most recently used."""
        row = self._rows.setdefault(first, OrderedDict())
        self._rows.move_to_end(first)
        row[rest] = None
        row.move_to_end(rest)
        if len(row) > self.guesses:
            row.popitem(last=False)
        if len(self._rows) > self.capacity:
            self._rows.popitem(last=False)

    def get(self, first: int) -> list[tuple[int, ...]]:
        """Returns n-grams without their first token, the most recently used first."""
        return list(reversed(self._rows.get(first, ())))


@dataclass(eq=False)
class Window:
    """State of a sequence.

    Attributes:
        rows: Rows of guesses. Row 0 lacks its first column, which is the last committed token.
        pool: N-grams of this sequence.
        last: Last committed token when the draft was made.
        nodes: Rows of the step's logits that give the next row of guesses.
        fed: Position in the text from which further n-grams go into the pool.
    """

    rows: list[list[int]]
    pool: NgramPool
    last: int = 0
    nodes: list[int] = field(default_factory=list)
    fed: int = 0


class LookaheadDrafter(Drafter):
    """Drafts n-grams that the target itself produced.

    A step costs `(N - 1) W - 1` window nodes and at most `G (N - 1)` candidates. If the budget is
    too small for the window, the drafter proposes n-grams of the pool only.

    Args:
        window: W, the number of columns.
        ngram: N, the length of an n-gram.
        guesses: G, the most n-grams per step.
        from_text: True to add the n-grams of prompt and output to the pool.
        pool_size: Most first tokens in the pool.

    Raises:
        ValueError: If a number is out of its range.
    """

    name = "lookahead"

    def __init__(
        self,
        window: int = 5,
        ngram: int = 4,
        guesses: int = 5,
        from_text: bool = True,
        pool_size: int = 4096,
    ) -> None:
        if window < 1 or ngram < 2 or guesses < 1 or pool_size < 1:
            raise ValueError(
                f"window {window}, guesses {guesses} and pool_size {pool_size} must be at least 1, "
                f"ngram {ngram} at least 2"
            )
        self.window, self.ngram = window, ngram
        self.guesses, self.from_text, self.pool_size = guesses, from_text, pool_size
        self._windows: dict[int, Window] = {}

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns n-grams of the pool as candidates, followed by the window."""
        return [self._draft(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def _draft(self, context: TextContext, budget: Budget) -> TextDraft:
        window = self._windows.get(context.id)
        if window is None:
            window = self._windows[context.id] = self._start(context)
        if self.from_text:
            self._feed(window, context.tokens)
        window.nodes, window.last = [], context.tokens[-1]
        budget = limit_budget(context, budget, self.ngram * (self.window + self.guesses))
        guesses = window.pool.get(context.tokens[-1])
        tree = DraftTree()
        if only_chains(context):
            if guesses:
                tree.add_path(guesses[0][: budget.depth], budget.num_nodes)
            return tree.finish(tree.preorder())
        width = len(window.rows[0]) + 1
        size = width * len(window.rows) - 1
        fits = size <= budget.num_nodes and width + len(window.rows) - 2 <= budget.depth
        room = budget.num_nodes - (size if fits else 0)
        for guess in guesses:
            tree.add_path(guess[: budget.depth], room)
        wanted = _add_window(tree, window.rows) if fits else []
        order = tree.preorder()
        if not order:
            return empty_draft()
        # Row 0 of a step's logits is the last committed token; row 1 + i is draft node i.
        place = {node: 1 + i for i, node in enumerate(order)} | {ROOT: 0}
        window.nodes = [place[node] for node in wanted]
        return tree.finish(order)

    def _start(self, context: TextContext) -> Window:
        """Starts a window. Row 0 holds random tokens of the prompt, keyed by the request's seed."""
        prompt = context.tokens[: context.num_prompt]
        count = self.window + self.ngram - 3
        keys = torch.tensor([[context.params.seed], [len(prompt)]])
        shares = uniform(keys[0], keys[1], count, DRAFT)[0].tolist() if count > 0 else []
        row = [prompt[int(share * len(prompt))] for share in shares]
        return Window([row], NgramPool(self.guesses, self.pool_size))

    def _feed(self, window: Window, tokens: list[int]) -> None:
        for end in range(max(window.fed, self.ngram), len(tokens) + 1):
            first, *rest = tokens[end - self.ngram : end]
            window.pool.add(first, tuple(rest))
        window.fed = len(tokens) + 1

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Appends the last row's argmaxes as the next row, and moves full columns to the pool."""
        moving = [o for o in outcomes if len(o.draft) and self._windows[o.context.id].nodes]
        if not moving:
            return
        wanted = [self._windows[outcome.context.id].nodes for outcome in moving]
        # The window is on the host, so each step copies only its new row from the device.
        rows = [
            o.logits[on_device(n, o.logits.device)] for o, n in zip(moving, wanted, strict=True)
        ]
        best = torch.cat([row.argmax(-1) for row in rows])
        found = torch.split(best.cpu(), [len(nodes) for nodes in wanted])
        for outcome, row in zip(moving, found, strict=True):
            self._move(self._windows[outcome.context.id], outcome.context, row.tolist())

    def _move(self, window: Window, context: TextContext, row: list[int]) -> None:
        stops = context.params.stop_token_ids
        prompt = context.tokens[: context.num_prompt]
        # Guesses after a stop token are useless, so prompt tokens replace stop tokens, as in the
        # original.
        row = [
            prompt[(context.num_output + j) % len(prompt)] if token in stops else token
            for j, token in enumerate(row)
        ]
        rows = window.rows
        if len(rows) == self.ngram - 1:
            firsts = [window.last, *rows[0]]
            for j, first in enumerate(firsts):
                window.pool.add(first, (*(own[j] for own in rows[1:]), row[j]))
            following = [*rows[1:], row]
            window.rows = [following[0][1:], *following[1:]]
        else:
            # The window still grows: it drops its first column and gains a row.
            window.rows = [own[1:] for own in [*rows, row]]
        window.nodes = []

    def forget(self, context_id: int) -> None:
        """Drops the sequence's window and pool."""
        self._windows.pop(context_id, None)


def _add_window(tree: DraftTree, rows: Seq[Seq[int]]) -> list[int]:
    """Adds the window's nodes, column by column.

    Returns:
        Nodes of the last row, whose logits give the next row.
    """
    wanted = []
    first = ROOT
    for j in range(len(rows[0]) + 1):
        if j:
            first = tree.add_auxiliary(first, rows[0][j - 1])
        node = first
        for row in rows[1:]:
            node = tree.add_auxiliary(node, row[j])
        wanted.append(node)
    return wanted
