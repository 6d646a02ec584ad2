"""Drawn texts with repeats, and the paths of a draft."""

import random


def drawn_text(seed: int, length: int, vocabulary: int) -> list[int]:
    """Random with repeats: pieces of it are copied further on."""
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
    """Tokens on the way to every node, in node order."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found
