"""Prefill: prompts are computed in chunks, and a shared beginning is computed once."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from recserve.engine.runtime.scheduler import Chunk
from recserve.engine.text.sequence import TextSequence


def chunks(texts: Iterable[TextSequence], most: int) -> list[Chunk[TextSequence]]:
    """Returns the chunks of one step with at most `most` tokens, in the order of the texts."""
    left, found = most, []
    for text in texts:
        if text.ready:
            continue
        size = min(text.missing, left)
        if size:
            found.append(Chunk(text, size))
            left -= size
    return found


def computed_by_another(text: TextSequence, others: Iterable[TextSequence], page_size: int) -> bool:
    """Returns whether another text will soon compute at least one page of this text's beginning.

    Waiting for it takes no more time than computing the page twice.
    """
    rows = text.context.tokens[:-1]
    return any(
        not other.ready
        and other.request.salt == text.request.salt
        and shared_rows(rows, other.context.tokens[:-1], page_size)
        >= other.num_computed + page_size
        for other in others
    )


def shared_rows(rows: Seq[int], other: Seq[int], page_size: int) -> int:
    """Returns how many rows at the beginning could come from the other text's pages.

    These are whole pages, and the last partial page if one of the texts ends in it.
    """
    size, shared = min(len(rows), len(other)), 0
    while shared < size:
        stop = min(shared + page_size, size)
        if rows[shared:stop] != other[shared:stop]:
            break
        shared = stop
    return shared
