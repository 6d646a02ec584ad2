"""Texts as Python strings with one character per token, so that `str.rfind` finds n-grams.

A search costs about one nanosecond per token of the text. Nothing else is stored or updated.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch

from recserve.speculation.draft import TextDraft
from recserve.speculation.drafter import TextContext

MAX_TOKENS = 0x10FFFF  # the last character that Python has; it is GAP
GAP = chr(MAX_TOKENS)  # separates two texts in one string; no token has this character


def to_string(tokens: Seq[int]) -> str:
    """Returns one character per token.

    Args:
        tokens: Token ids, each below MAX_TOKENS.
    """
    return "".join(map(chr, tokens))


def earlier_ends(text: str, length: int) -> Iterator[int]:
    """Yields the ends of earlier occurrences of the last `length` characters, newest first.

    An end is the index of the character after the occurrence.
    """
    tail, stop = text[-length:], len(text) - 1
    while (start := text.rfind(tail, 0, stop)) >= 0:
        yield start + length
        stop = start + length - 1


def draft_of_paths(paths: Seq[str]) -> TextDraft:
    """Returns the draft whose nodes are the ends of these paths.

    Args:
        paths: Distinct non-empty strings; each prefix of a path is also a path.
    """
    ordered = sorted(paths)
    index = {path: i for i, path in enumerate(ordered)}
    return TextDraft(
        torch.tensor([ord(path[-1]) for path in ordered]),
        torch.tensor([index.get(path[:-1], -1) for path in ordered]),
        max(map(len, ordered)),
    )


class RunningTexts:
    """The strings of running sequences, by context id."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def update(self, context: TextContext) -> str:
        """Returns the string of all committed tokens of a sequence."""
        text = self._texts.get(context.id, "")
        text += to_string(context.tokens[len(text) :])
        self._texts[context.id] = text
        return text

    def forget(self, context_id: int) -> None:
        """Drops the string of a sequence."""
        self._texts.pop(context_id, None)
