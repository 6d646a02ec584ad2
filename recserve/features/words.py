"""What counts as the same text, and the words of a text, in every script.

Three rules, from the strictest to the loosest. Each is defined here and nowhere else:

- Ids are equal if their characters are.
- Values of filters and categories are equal if `canonical` is: "é" may be one character or two.
- Titles, searches and hints compare `fold`: forms, width and case do not count either.

`words` divides a folded text. A word begins with a letter or digit and includes the marks that
follow, so a vowel sign of Devanagari does not end it. Scripts without spaces between words, such as
Chinese, Japanese and Thai, give pairs of neighbouring characters instead.

Source: Unicode 15, UAX 15 (normalisation), UAX 29 (marks), NFKC_Casefold. Pairs of characters are
how Lucene's CJKBigramFilter indexes such scripts.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable
from functools import cache

CATEGORY_TERM = r"c:\S+"  # a category prefix among the words of an item (vectors/text_encoder.py)
ASCII_WORDS = re.compile(rf"[^\W_]{{2,}}|{CATEGORY_TERM}", re.ASCII)

# Characters that change nothing: joiners, soft hyphens, selectors of variants.
IGNORED = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff]"
)
# Blocks whose letters stand without spaces between words: Thai and Lao, Myanmar, Khmer, Tai Le to
# New Tai Lue, Tai Tham, kana, Bopomofo and Han, Yi, Myanmar and Tai Viet extended, later Han.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u2e80-\u312f\u31a0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\ua9e0-\ua9ff\uaa60-\uaadf\uf900-\ufaff"
    "\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
HANGUL = "\uac00-\ud7a3"  # one syllable may be a word


def canonical(text: str) -> str:
    """Returns the form that is the same for all canonically equivalent texts (NFC)."""
    return unicodedata.normalize("NFC", text)


def fold(text: str) -> str:
    """Returns a text without differences of normalisation, width, ligature and case.

    This is NFKC, case folding, and NFKC again, without characters that show nothing.
    """
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFKC", text).casefold()
    return unicodedata.normalize("NFKC", IGNORED.sub("", folded))


def words(text: str) -> list[str]:
    """Returns the words of a text, folded, in their order.

    - A word has two characters or more, marks included.
    - A run of letters without spaces gives each pair of neighbours. A single one is a word.
    - A single syllable of Hangul is a word.
    - `c:` and what follows up to a space is one word, see `vectors/text_encoder.py`.
    """
    folded = fold(text)
    if folded.isascii():
        return ASCII_WORDS.findall(folded)
    every, character = _patterns()
    found: list[str] = []
    for match in every.finditer(folded):
        if match.lastgroup != "unspaced":
            found.append(match[0])
            continue
        characters = character.findall(match[0])
        pairs = [a + b for a, b in zip(characters, characters[1:], strict=False)]
        found += pairs or characters
    return found


def closest(text: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Returns at most `count` of the known texts that resemble a text, the nearest first."""
    folded = {fold(other): other for other in known}
    return [folded[near] for near in difflib.get_close_matches(fold(text), folded, count)]


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Returns the pattern of words and runs, and that of a character with its marks."""
    marks = _marks()
    unspaced = rf"(?=[^\W\d_])[{UNSPACED}][{marks}]*"
    letter = rf"(?:\d|[^\W_{UNSPACED}])"
    word = rf"{letter}(?:{letter}|[{marks}])+|[{HANGUL}]"
    every = re.compile(rf"(?P<unspaced>(?:{unspaced})+)|{word}|{CATEGORY_TERM}")
    return every, re.compile(unspaced)


def _marks() -> str:
    """Returns the ranges of all combining marks, for a pattern. Selectors beyond are IGNORED."""
    marks = [c for c in range(0x300, 0x20000) if unicodedata.category(chr(c)) in ("Mn", "Mc")]
    ends = [i for i, c in enumerate(marks) if i + 1 == len(marks) or marks[i + 1] != c + 1]
    starts = [0, *(i + 1 for i in ends[:-1])]
    return "".join(f"{chr(marks[a])}-{chr(marks[b])}" for a, b in zip(starts, ends, strict=True))
