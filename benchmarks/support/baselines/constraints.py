"""The trie as `generate` wants it: a processor in tensors, and a function that lists tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessor

from recserve.kernels.trie.trie import Trie


def walk(trie: Trie, codes: Tensor) -> Tensor:
    """Trie node of each code prefix, 0 where it does not exist. codes [n, l] -> [n]."""
    nodes = torch.zeros(codes.shape[0], dtype=torch.int64)
    for column in codes.unbind(1):
        children = trie.children(nodes)
        found = children.valid & (children.codes == column[:, None])
        nodes = torch.where(found, children.nodes, 0).sum(1)
    return nodes


class TrieProcessor(LogitsProcessor):
    """Log-probabilities of the children of each beam's prefix, -inf elsewhere, all rows at once.

    start: length of the prompt (1 for the decoder of a T5). offsets [L]: first token of each level.
    normalise: the softmax runs over the valid children, else over what the model gave.
    """

    def __init__(self, trie: Trie, offsets: tuple[int, ...], start: int, normalise: bool) -> None:
        self.trie = trie
        self.offsets = torch.tensor(offsets)
        self.start = start
        self.normalise = normalise

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [n, t], scores [n, V] -> [n, V]."""
        written = input_ids[:, self.start :]
        level = written.shape[1]
        children = self.trie.children(walk(self.trie, written - self.offsets[:level]))
        tokens = children.codes.long() + self.offsets[level]
        kept = scores.gather(1, tokens).masked_fill(~children.valid, float("-inf"))
        if self.normalise:
            kept = kept.float().log_softmax(-1).nan_to_num(nan=float("-inf"))
        out = torch.full(scores.shape, float("-inf"), dtype=kept.dtype)
        # Padding repeats the code 0, so it must lose against the real child of that code.
        return out.scatter_reduce(1, tokens, kept, "amax")


def allowed_tokens(
    trie: Trie, offsets: tuple[int, ...], start: int
) -> Callable[[int, Tensor], list[int]]:
    """A `prefix_allowed_tokens_fn`, called once per beam and step: a dictionary lookup."""
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
