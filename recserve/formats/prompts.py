"""Turns the prompts of a format into tokens with references to the codes of a history.

A prompt is made for each number of items, from drawn ids. The tokens of the ids become references.
A second draw proves that the tokens around the ids do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from recserve.formats.checkpoint_format import ImportFault

MAX_TOKENS = 1 << 25  # of all prompts
DRAWS = 2


def compile_prompts(
    encode: Callable[[Sequence[Sequence[int]]], list[int]],
    codes: Sequence[Mapping[int, int]],
    max_items: int,
) -> tuple[list[np.ndarray], set[int]]:
    """Returns the prompts of 0, 1, ..., `max_items` items, and the tokens that they hold.

    Args:
        encode: Returns the tokens of a prompt from the codes of each item of a history.
        codes: [L] the tokens of each level's codes.
        max_items: Most items in a prompt.

    Returns:
        Prompts as in `ImportedTemplate`, with the tokens of the checkpoint, and these tokens.

    Raises:
        ImportFault: If a prompt has no ids, or its other tokens depend on them.
    """
    draw = np.random.default_rng(0)
    prompts: list[np.ndarray] = []
    used: set[int] = set()
    total = 0
    for count in range(max_items + 1):
        histories = [_history(draw, codes, count) for _ in range(DRAWS)]
        prompt = _with_references(encode(histories[0]), histories[0], codes)
        for history in histories:
            if _filled(prompt, history, codes) != encode(history):
                raise ImportFault(
                    f"the prompt of {count} items has other tokens for other ids; each code must "
                    "be a token of its own, and a template must not change ids"
                )
        if not prompt.size:
            raise ImportFault(f"the prompt of {count} items is empty; write a text before them")
        if count and (prompt >= 0).all():
            raise ImportFault(
                f"the prompt of {count} items holds none of their ids; write them as in "
                "{{ history | join(', ') }}"
            )
        total += prompt.size
        if total > MAX_TOKENS:
            raise ImportFault(
                f"the prompts of 0 to {count} items have over {MAX_TOKENS} tokens; choose a "
                "smaller --max-history"
            )
        prompts.append(prompt)
        used.update(prompt[prompt >= 0].tolist())
    return prompts, used


def _history(
    draw: np.random.Generator, codes: Sequence[Mapping[int, int]], count: int
) -> list[tuple[int, ...]]:
    """Returns drawn ids, distinct if there are so many."""
    levels = [list(level) for level in codes]
    most = 1
    for level in levels:
        most = min(most * len(level), 1 << 40)
    found: list[tuple[int, ...]] = []
    there: set[tuple[int, ...]] = set()
    while len(found) < count:
        one = tuple(int(level[draw.integers(len(level))]) for level in levels)
        if one not in there or len(there) == most:
            there.add(one)
            found.append(one)
    return found


def _with_references(
    tokens: list[int], history: Sequence[Sequence[int]], codes: Sequence[Mapping[int, int]]
) -> np.ndarray:
    levels = len(codes)
    places: dict[tuple[int, ...], list[int]] = {}
    for place, item in enumerate(history):
        spelled = tuple(level[code] for level, code in zip(codes, item, strict=True))
        places.setdefault(spelled, []).append(place)
    out, at = list[int](), 0
    while at < len(tokens):
        at_place = places.get(tuple(tokens[at : at + levels]))
        if at_place is None:
            out.append(tokens[at])
            at += 1
        else:
            place = at_place.pop(0) if len(at_place) > 1 else at_place[0]
            out += [-1 - (place * levels + level) for level in range(levels)]
            at += levels
    return np.array(out, np.int64)


def _filled(
    prompt: np.ndarray, history: Sequence[Sequence[int]], codes: Sequence[Mapping[int, int]]
) -> list[int]:
    own = [level[code] for item in history for level, code in zip(codes, item, strict=True)]
    return [token if token >= 0 else own[-1 - token] for token in prompt.tolist()]
