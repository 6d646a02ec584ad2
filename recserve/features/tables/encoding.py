"""The window of a history that a model reads."""

from __future__ import annotations


def window_start(num_events: int, max_items: int, block: int) -> int:
    """Returns the first event of the window that the model reads.

    The window of a long history moves by whole blocks. Its start stays the same for `block` events,
    and so the cached prefix stays valid. The window then holds between `max_items - block + 1` and
    `max_items` events.

    Args:
        num_events: Length of the history.
        max_items: Largest window, in events.
        block: Events by which the window moves.

    Raises:
        ValueError: Unless 1 <= block <= max_items.
    """
    if not 1 <= block <= max_items:
        raise ValueError(f"block is {block}; expected 1..{max_items} (max_items)")
    # Round the number of events before the window up to whole blocks.
    return max(0, -(-(num_events - max_items) // block) * block)
