"""The target's distribution at any node of a step's trees, with every sampling parameter applied.

Rows are worked out when a verifier asks for them: it visits a few nodes of a large tree, and
sorting a vocabulary for each of the others would cost more than the forward.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.core import sampling
from recserve.core.sampling_table import ANY, SamplingTable
from recserve.core.text import TextContext
from recserve.kernels.tree import TokenTree

NO_TOKEN = -2


class TokenCounts:
    """How often each token of the vocabulary stands in a sequence: [V] int32 each.

    seen: in prompt and output. written: in the output.
    """

    def __init__(self, prompt: Seq[int], vocab_size: int, device: torch.device | str) -> None:
        tokens = torch.tensor(prompt, dtype=torch.int64, device=device)
        self.seen = torch.bincount(tokens, minlength=vocab_size).to(torch.int32)
        self.written = torch.zeros_like(self.seen)

    def add(self, tokens: Seq[int]) -> None:
        """Committed tokens of the output."""
        index = torch.tensor(tokens, dtype=torch.int64, device=self.seen.device)
        ones = torch.ones_like(index, dtype=torch.int32)
        self.seen.index_add_(0, index, ones)
        self.written.index_add_(0, index, ones)


@dataclass(frozen=True)
class Target:
    """Logits of B trees and all that turns them into distributions.

    logits [T, V] raw. depth: most levels below node 0. counts: None for the sequences whose
    parameters count nothing.
    """

    logits: Tensor
    tree: TokenTree
    depth: int
    table: SamplingTable
    contexts: Seq[TextContext]
    counts: Seq[TokenCounts | None]

    def __call__(self, nodes: Tensor) -> Tensor:
        """nodes [m] packed -> [m, V] float32 or wider; -inf where the probability is 0.

        In a greedy batch the largest logit of a row is what counts, and the others are not banned.
        """
        table = self.table
        rows = self.logits[nodes]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if table.greedy and table.plain:
            return rows
        owners = torch.searchsorted(self.tree.offsets, nodes, right=True) - 1
        if not table.plain:
            rows = self._by_path(rows, nodes, owners)
        if table.greedy:
            return rows
        temperature = table.temperature[owners]
        rows = sampling.temper(rows, temperature)
        if table.truncates:
            rows = sampling.truncate(
                rows, table.top_k[owners], table.top_p[owners], table.min_p[owners]
            )
        return sampling.keep_only_best(rows, temperature == 0)

    def _by_path(self, rows: Tensor, nodes: Tensor, owners: Tensor) -> Tensor:
        """What depends on the tokens before the node: bias, stops, bad words, penalties."""
        table = self.table
        if table.bias is not None:
            row, entry = (owners[:, None] == table.bias.owners).nonzero(as_tuple=True)
            place = (row, table.bias.tokens[entry])
            rows.index_put_(place, table.bias.values[entry].to(rows.dtype), accumulate=True)
        if table.stops is not None:
            written = torch.tensor([c.num_output for c in self.contexts], device=rows.device)
            number = written[owners] + self.tree.depths[nodes]
            held = (number < table.min_tokens[owners])[:, None]
            row, entry = (held & (owners[:, None] == table.stops.owners)).nonzero(as_tuple=True)
            rows[row, table.stops.tokens[entry]] = sampling.BANNED
        paths = sampling.path_tokens(self.tree, nodes, self.depth)
        if table.bad_words is not None:
            self._ban_words(rows, paths, owners)
        if table.counts:
            rows = self._penalise(rows, paths, owners)
        return rows

    def _ban_words(self, rows: Tensor, paths: Tensor, owners: Tensor) -> None:
        words = self.table.bad_words
        assert words is not None
        width = words.before.shape[1]
        tails = [c.tokens[: -width - 1 : -1] for c in self.contexts]
        padded = [tail + [NO_TOKEN] * (width - len(tail)) for tail in tails]
        committed = torch.tensor(padded, dtype=torch.int64, device=rows.device)
        before = sampling.last_tokens(paths, committed[owners], width)
        same = (words.before == ANY) | (words.before == before[:, None])
        ended = same.all(-1) & (owners[:, None] == words.owners)
        row, word = ended.nonzero(as_tuple=True)
        rows[row, words.last[word]] = sampling.BANNED

    def _penalise(self, rows: Tensor, paths: Tensor, owners: Tensor) -> Tensor:
        none = torch.zeros(rows.shape[1], dtype=torch.int32, device=rows.device)
        seen = torch.stack([none if c is None else c.seen for c in self.counts])[owners]
        written = torch.stack([none if c is None else c.written for c in self.counts])[owners]
        return sampling.penalise(
            rows,
            sampling.add_path_counts(seen, paths),
            sampling.add_path_counts(written, paths),
            self.table.repetition[owners],
            self.table.presence[owners],
            self.table.frequency[owners],
        )
