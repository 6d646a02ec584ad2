"""Names of event types: the built-in ones, and what a further name may be."""

from __future__ import annotations

from collections.abc import Collection

# A stored event holds the number of its type. These are the numbers 0 to 13 in every store.
EVENT_TYPES = (
    *("event", "view", "click", "cart", "purchase"),
    *("like", "dislike", "rating", "share", "save"),
    *("play", "complete", "skip", "hide"),
)
MAX_EVENT_TYPES = 255  # with the built-in ones; a stored event has one byte for the number
MAX_TYPE_BYTES = 64
SHOWN = 3


def type_name_fault(name: str) -> str | None:
    """Returns why no event type can have a name; None if one can."""
    if not name.strip():
        return f"event type {name[:40]!r} is blank"
    size = len(name.encode(errors="surrogatepass"))
    if size > MAX_TYPE_BYTES:
        return f"event type {name[:40]!r} has {size} bytes of UTF-8; at most {MAX_TYPE_BYTES}"
    if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        return f"event type {name[:40]!r} is not valid text"
    return None


def check_type_names(names: Collection[str]) -> None:
    """Raises ValueError if a name is blank or too long, or if there are too many."""
    for name in names:
        if (fault := type_name_fault(name)) is not None:
            raise ValueError(fault)
    further, most = sorted(set(names) - set(EVENT_TYPES)), MAX_EVENT_TYPES - len(EVENT_TYPES)
    if len(further) > most:
        beyond = ", ".join(repr(name) for name in further[most : most + SHOWN])
        raise ValueError(
            f"{len(further)} event types besides the {len(EVENT_TYPES)} built-in ones; at most "
            f"{most}, which {beyond}{' and others' if len(further) > most + SHOWN else ''} exceed"
        )
