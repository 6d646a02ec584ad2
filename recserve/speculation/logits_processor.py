"""The target distribution at tree nodes: raw logits with all sampling parameters applied.

Rows are computed on demand. A verifier visits few nodes of a large tree, and sorting the
vocabulary for all other nodes would cost more than the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.acceptance.masks import TokenMasks
from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree
from recserve.speculation import sampling
from recserve.speculation.drafter import TextContext
from recserve.speculation.sampling_table import WILDCARD, SamplingTable

NO_TOKEN = -2


class TokenCounts:
    """Occurrences of each vocabulary token in the texts of a slot table, by their rows.

    Only the rows of texts with penalties mean anything. A step adds the tokens that it accepts.

    Attributes:
        both: [2, R, V] int32 occurrences in prompt and output, and in the output alone.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.both = torch.zeros(2, rows, vocab_size, dtype=torch.int32, device=device)

    def start(self, row: int, context: TextContext) -> None:
        """Counts the tokens that a text has when it gets its row."""
        tokens = on_device(context.tokens, self.both.device, torch.int64)
        size = self.both.shape[2]
        self.both[0, row] = torch.bincount(tokens, minlength=size)
        self.both[1, row] = torch.bincount(tokens[context.num_prompt :], minlength=size)

    def add(self, rows: Tensor, tokens: Tensor, which: Tensor) -> None:
        """Counts accepted tokens. It only launches kernels.

        Args:
            rows: [B] rows of the texts.
            tokens: [B, m] token ids where `which` is true, anything elsewhere.
            which: [B, m] bool, the tokens to count.
        """
        place = torch.where(which, tokens, 0) + (rows * self.both.shape[2])[:, None]
        ones = which.to(torch.int32).view(1, -1).expand(2, -1)
        self.both.view(2, -1).index_add_(1, place.view(-1), ones)


@dataclass(frozen=True)
class Past:
    """Data about the committed tokens of B sequences that their sampling parameters need.

    Attributes:
        numbers: [B] int64 number of output tokens.
        tails: [B, W] int64 last W committed tokens, nearest first, NO_TOKEN before the first token.
            W is the length of the longest bad word minus one.
        seen: [B, V] int32 as in TokenCounts; None if no sequence has penalties.
        written: [B, V] int32, like `seen`.
    """

    numbers: Tensor
    tails: Tensor
    seen: Tensor | None = None
    written: Tensor | None = None


@dataclass(frozen=True)
class TextColumns:
    """Data about the committed tokens of B sequences, on the device.

    Attributes:
        lengths: [B] int64 number of committed tokens.
        rows: [B] int64 row of the slot table.
        numbers: [B] int64 number of output tokens.
        last_tokens: [B, W] int64, `Past.tails`. [B, 0] without bad words.
    """

    lengths: Tensor
    rows: Tensor
    numbers: Tensor
    last_tokens: Tensor

    @staticmethod
    def of(contexts: Seq[TextContext], table: SamplingTable) -> TextColumns:
        """Uploads the columns of sequences with these sampling parameters."""
        device = table.seeds.device
        columns = [(len(c.tokens), c.row, c.num_output) for c in contexts]
        lengths, rows, numbers = on_device(list(zip(*columns, strict=True)), device).unbind()
        last_tokens = lengths[:, None][:, :0]
        if table.bad_words is not None:
            width = table.bad_words.before.shape[1]
            tails = [last_committed(context, width) for context in contexts]
            last_tokens = on_device(tails, device, torch.int64)
        return TextColumns(lengths, rows, numbers, last_tokens)

    def past(self, table: SamplingTable, counts: TokenCounts | None) -> Past | None:
        """Returns what the sampling parameters need. None: only temperature and truncation matter.

        Args:
            table: Sampling parameters of the sequences.
            counts: Token counts of all rows. None if no sequence has penalties.
        """
        if table.plain:
            return None
        seen, written = (None, None) if counts is None else counts.both[:, self.rows]
        return Past(self.numbers, self.last_tokens, seen, written)


def last_committed(context: TextContext, width: int) -> list[int]:
    """Returns the last `width` committed tokens, nearest first, NO_TOKEN before the first token."""
    tail = context.tokens[: -width - 1 : -1]
    return tail + [NO_TOKEN] * (width - len(tail))


@dataclass(frozen=True)
class LogitsProcessor:
    """Computes target distributions from the raw logits of B trees.

    Attributes:
        logits: [T, V] raw logits.
        tree: The B packed trees.
        depth: Most levels below node 0.
        table: Sampling parameters of the B sequences.
        past: Committed tokens as the parameters need them; None if `table.plain`.
        fixed_shapes: True to avoid every host synchronisation, so that shapes depend on T, B, V and
            depth alone.
        masks: Tokens that may follow each node. None: all may follow all nodes.
    """

    logits: Tensor
    tree: TokenTree
    depth: int
    table: SamplingTable
    past: Past | None
    fixed_shapes: bool = False
    masks: TokenMasks | None = None

    def __call__(self, nodes: Tensor) -> Tensor:
        """Returns the processed logits of some nodes.

        A greedy batch only needs each row's largest logit, so the others are not banned there.

        Args:
            nodes: [m] packed node indices.

        Returns:
            [m, V] logits, float32 or wider; -inf where the probability is 0.
        """
        table = self.table
        rows = self.logits[nodes]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.masks is not None:
            self.masks.apply(rows, nodes)
        if table.greedy and table.plain:
            return rows
        # Tree b owns the nodes offsets[b] : offsets[b + 1].
        owners = torch.searchsorted(self.tree.offsets, nodes, right=True) - 1
        if self.past is not None:
            rows = self._by_path(rows, nodes, owners, self.past)
        if table.greedy:
            return rows
        temperature = table.temperature[owners]
        rows = sampling.temper(rows, temperature)
        if table.truncates:
            cut = sampling.truncate_fixed if self.fixed_shapes else sampling.truncate
            rows = cut(rows, table.top_k[owners], table.top_p[owners], table.min_p[owners])
        return sampling.keep_only_best(rows, temperature == 0)

    def _by_path(self, rows: Tensor, nodes: Tensor, owners: Tensor, past: Past) -> Tensor:
        """Applies what depends on the tokens before a node: bias, stops, bad words, penalties."""
        table = self.table
        if table.bias is not None:
            own = owners[:, None] == table.bias.owners
            added = torch.where(own, table.bias.values.to(rows.dtype), 0.0)
            rows.scatter_add_(1, table.bias.tokens.expand_as(own), added)
        if table.stops is not None:
            number = past.numbers[owners] + self.tree.depths[nodes]
            # A stop token stays banned while fewer than min_tokens tokens precede the draw.
            held = (number < table.min_tokens[owners])[:, None]
            own = held & (owners[:, None] == table.stops.owners)
            rows = sampling.ban(rows, table.stops.tokens, own)
        paths = sampling.path_tokens(self.tree, nodes, self.depth)
        if table.bad_words is not None:
            words = table.bad_words
            before = sampling.last_tokens(paths, past.tails[owners], words.before.shape[1])
            same = (words.before == WILDCARD) | (words.before == before[:, None])
            own = same.all(-1) & (owners[:, None] == words.owners)
            rows = sampling.ban(rows, words.last, own)
        if past.seen is not None and past.written is not None:
            rows = sampling.penalise(
                rows,
                sampling.add_path_counts(past.seen[owners], paths),
                sampling.add_path_counts(past.written[owners], paths),
                table.repetition[owners],
                table.presence[owners],
                table.frequency[owners],
            )
        return rows
