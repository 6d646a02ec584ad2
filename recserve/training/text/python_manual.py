"""English prose that every Python installation carries: the language reference behind `help()`."""

from __future__ import annotations

import re

MIN_CHARACTERS = 80
MIN_LETTERS = 0.9  # share of letters and spaces in a paragraph; code and tables have fewer


def python_manual() -> list[str]:
    """Returns the paragraphs of prose of each topic of Python's language reference.

    Returns:
        One text per topic, in alphabetical order; 0.3 million characters. Empty if this Python
        comes without the module `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    texts = []
    for _, topic in sorted(topics.items()):
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", topic)]
        prose = [paragraph for paragraph in paragraphs if _is_prose(paragraph)]
        if prose:
            texts.append("\n\n".join(prose) + "\n")
    return texts


def _is_prose(paragraph: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return (
        len(paragraph) >= MIN_CHARACTERS
        and paragraph[0].isalpha()
        and letters >= MIN_LETTERS * len(paragraph)
    )
