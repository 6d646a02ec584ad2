"""Random texts with repeats, and the paths of a draft."""

import random
from collections.abc import Sequence
from math import prod

from recserve.drafters.shared.rank_tree import RankTree


def drawn_text(seed: int, length: int, vocabulary: int) -> list[int]:
    """Returns random tokens in which some pieces are copied to later places."""
    rng = random.Random(seed)
    text: list[int] = []
    while len(text) < length:
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randrange(1, 9)]
        else:
            text.append(rng.randrange(vocabulary))
    return text[:length]


def paths(draft) -> list[tuple[int, ...]]:
    """Returns the tokens on the path to every node, in node order."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def mean_accept_length(tree: RankTree, accuracies: Sequence[Sequence[float]]) -> float:
    """Returns the mean accept length if levels are right independently of each other."""
    ranks = (enumerate(path) for path in tree.paths)
    return sum(prod(accuracies[depth][rank] for depth, rank in path) for path in ranks)
