"""A bound on how much text one token can stand for, so that long texts are refused unencoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recserve.tokenizer.token_bytes import ALPHABET

# A token stands for at most as many bytes of normalised text as it is spelled with, if no step of
# the tokeniser drops text. A normaliser may have shortened the text before that: normal forms and
# lower case by 4 at most (a mathematical letter of 4 bytes becomes one of 1; checked for every
# character and composite of Unicode 14). What only lengthens a text counts as 1. Anything else may
# drop text and gives no bound.
SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4, "Prepend": 1}
SPLITTERS = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(0x100))


def max_bytes_per_token(
    fields: Mapping[str, Any], vocabulary: Mapping[str, int], spelled: Sequence[bytes]
) -> int | None:
    """Returns the most UTF-8 bytes of a text that one token can stand for.

    Args:
        fields: Contents of tokenizer.json.
        vocabulary: Token to number, added tokens included.
        spelled: Bytes that each token number writes.

    Returns:
        None if there is no bound, because the tokeniser may drop text.
    """
    model, added = fields["model"], fields.get("added_tokens") or ()
    splitters = _steps(fields.get("pre_tokenizer"), "pretokenizers")
    shrink = _shrink(_steps(fields.get("normalizer"), "normalizers"))
    byte_level = any(step["type"] == "ByteLevel" for step in splitters)
    complete = (ALPHABET if byte_level else BYTES) <= set(vocabulary)
    if (
        model.get("type") != "BPE"
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
        or not complete
        or not (byte_level or model.get("byte_fallback"))
        or not all(map(_keeps, splitters))
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
        or shrink is None
    ):
        return None
    sizes = [len(token) for token in spelled]
    if not byte_level:  # SentencePiece's `▁` writes a space, but a text may hold the `▁` itself
        sizes += [len(token.encode()) for token in vocabulary]
    # An added token that is normalised before it is compared may grow: a space to a `▁`.
    sizes += [3 * len(token["content"].encode()) for token in added if token.get("normalized")]
    return shrink * max(sizes)


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """A normaliser or pre-tokeniser as the list of what it does, sequences taken apart."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[inner] for step in _steps(each, inner)]


def _shrink(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns by what factor they may shorten a text in bytes; None: by any."""
    factor = 1
    for step in normalizers:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(pattern.encode()) > len(step["content"].encode()):
                return None
        elif step["type"] in SHRINKS:
            factor *= SHRINKS[step["type"]]
        else:
            return None
    return factor


def _keeps(splitter: Mapping[str, Any]) -> bool:
    """Whether all text is still there after this pre-tokeniser."""
    return splitter["type"] in SPLITTERS and splitter.get("behavior") != "Removed"
