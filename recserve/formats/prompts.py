"""Turns the prompts of a format into tokens with references to the codes of a history.

A prompt is made for each number of items, from drawn ids. The tokens of the ids become references.
A second draw proves that the tokens around the ids do not depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from recserve.formats.checkpoint_format import ImportFault

MAX_TOKENS = 1 << 25  # of all prompts
DRAWS = 2
MARK = "\ue000"  # a character of private use: no text of a template or an item has it


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
            if _fill(prompt, history, codes) != encode(history):
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


def compile_text_prompts(
    write: Callable[[Sequence[str]], Sequence[str]],
    encode: Callable[[Sequence[str]], list[int]],
    pieces: Callable[[str, bool], list[int]],
    texts: Sequence[str],
    max_items: int,
) -> tuple[list[np.ndarray], list[list[int]]]:
    """Returns prompts of items that are texts: tokens, with references to whole items.

    Args:
        write: Returns the texts of a prompt from the texts of a history.
        encode: Returns the tokens of these texts.
        pieces: Returns the tokens of a part of a prompt, and whether it is the first one.
        texts: [I] text of each item.
        max_items: Most items in a prompt.

    Returns:
        Prompts of 0, 1, ... items, in which -1 - i stands for item i of the history, and the tokens
        of each item.

    Raises:
        ImportFault: If the tokens of an item or of what is around it depend on each other.
    """
    own = [pieces(text, False) for text in texts]
    prompts: list[np.ndarray] = []
    total = sum(len(tokens) for tokens in own)
    draw = np.random.default_rng(0)
    for count in range(max_items + 1):
        parts = [re.split(f"{MARK}(\\d+){MARK}", one) for one in write(_marks(count))]
        prompt: list[int] = []
        for number, part in enumerate(parts):
            for place, piece in enumerate(part):
                if place % 2:
                    prompt.append(-1 - int(piece))
                elif piece or not prompt:
                    prompt += pieces(piece, not number and not place)
        if not prompt:
            raise ImportFault(f"the prompt of {count} items is empty; write a text before them")
        if count and min(prompt) >= 0:
            raise ImportFault(f"the prompt of {count} items holds none of them")
        total += len(prompt)
        if total > MAX_TOKENS:
            raise ImportFault(
                f"the prompts of 0 to {count} items have over {MAX_TOKENS} tokens; choose a "
                "smaller --max-history"
            )
        prompts.append(np.array(prompt, np.int64))
        drawn = [draw.integers(0, len(texts), count) for _ in range(DRAWS)]
        if count == max_items:  # each item is in a prompt that is compared
            every = np.resize(np.arange(len(texts)), -(-len(texts) // count) * count)
            drawn += list(every.reshape(-1, count))
        for history in drawn:
            whole = encode(write([texts[row] for row in history]))
            if whole != _with_items(prompt, [own[row] for row in history]):
                shown = ", ".join(repr(texts[row][:60]) for row in history[:2])
                raise ImportFault(
                    f"the prompt of {count} items, such as {shown}, has tokens that reach over the "
                    "end of an item; let --item-text end with a line end or a special token, and "
                    "begin with the text that follows it"
                )
    return prompts, own


def _marks(count: int) -> list[str]:
    return [f"{MARK}{place}{MARK}" for place in range(count)]


def _with_items(prompt: Sequence[int], items: Sequence[Sequence[int]]) -> list[int]:
    tokens: list[int] = []
    for token in prompt:
        tokens += [token] if token >= 0 else items[-1 - token]
    return tokens


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


def _fill(
    prompt: np.ndarray, history: Sequence[Sequence[int]], codes: Sequence[Mapping[int, int]]
) -> list[int]:
    own = [level[code] for item in history for level, code in zip(codes, item, strict=True)]
    return [token if token >= 0 else own[-1 - token] for token in prompt.tolist()]
