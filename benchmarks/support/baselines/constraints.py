"""Trie constraints for transformers' `generate`: a logits processor, and a token-list function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessor

from recserve.kernels.trie.trie import Trie


def walk(trie: Trie, codes: Tensor) -> Tensor:
    """Returns the trie node [n] of each code prefix [n, l], 0 if it does not exist."""
    nodes = torch.zeros(codes.shape[0], dtype=torch.int64)
    for column in codes.unbind(1):
        children = trie.children(nodes)
        found = children.valid & (children.codes == column[:, None])
        nodes = torch.where(found, children.nodes, 0).sum(1)
    return nodes


class TrieProcessor(LogitsProcessor):
    """Restricts each beam to the children of its prefix; other tokens get -inf.

    Attributes:
        start: Length of the prompt (1 for the decoder of a T5).
        offsets: [L] first token of each level.
        normalise: True normalises over the valid children; False uses the model's distribution.
    """

    def __init__(self, trie: Trie, offsets: tuple[int, ...], start: int, normalise: bool) -> None:
        self.trie = trie
        self.offsets = torch.tensor(offsets)
        self.start = start
        self.normalise = normalise

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Maps input_ids [n, t] and scores [n, V] to scores [n, V]."""
        written = input_ids[:, self.start :]
        level = written.shape[1]
        children = self.trie.children(walk(self.trie, written - self.offsets[:level]))
        tokens = children.codes.long() + self.offsets[level]
        kept = scores.gather(1, tokens).masked_fill(~children.valid, float("-inf"))
        if self.normalise:
            kept = kept.float().log_softmax(-1).nan_to_num(nan=float("-inf"))
        out = torch.full(scores.shape, float("-inf"), dtype=kept.dtype)
        # Padding repeats the code 0, so the real child of that code must override it.
        return out.scatter_reduce(1, tokens, kept, "amax")


def allowed_tokens(
    trie: Trie, offsets: tuple[int, ...], start: int
) -> Callable[[int, Tensor], list[int]]:
    """Returns a `prefix_allowed_tokens_fn`, which makes one dictionary lookup per beam and step."""
    levels = trie.num_levels
    table: dict[tuple[int, ...], list[int]] = {}
    codes = trie.node_codes.tolist()
    first = trie.first_child.tolist()
    prefixes: list[tuple[int, ...]] = [()]
    for level in range(levels):
        grown = []
        for node, prefix in enumerate(prefixes, trie.level_starts[level]):
            children = range(first[node], first[node + 1])
            table[prefix] = [codes[child] + offsets[level] for child in children]
            grown += [(*prefix, token) for token in table[prefix]]
        prefixes = grown

    def allowed(_: int, input_ids: Tensor) -> list[int]:
        return table.get(tuple(input_ids[start:].tolist()), [0])

    return allowed
