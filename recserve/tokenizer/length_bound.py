"""Bounds the text length of one token, so that overlong texts are rejected before encoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

from recserve.tokenizer.token_bytes import ALPHABET

# If no step of the tokeniser drops text, a token covers at most as many bytes of normalised text as
# it is spelled with. The normaliser may shorten the text before that. Normal forms and lower case
# shorten it by a factor of 4 at most: a mathematical letter of 4 bytes becomes a letter of 1 byte.
# That was checked for every character and composite of Unicode 14. A step that only lengthens text
# has factor 1. Any other step may drop text and gives no bound.
SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4, "Prepend": 1}
SPLITTERS = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(0x100))


def max_bytes_per_token(
    fields: Mapping[str, Any],
    added: Collection[AddedToken],
    vocabulary: Mapping[str, int],
    spelled: Sequence[bytes],
) -> int | None:
    """Returns the largest number of UTF-8 bytes of text that one token can cover.

    Args:
        fields: Contents of tokenizer.json.
        added: All added tokens.
        vocabulary: Token id of each token, added tokens included.
        spelled: Bytes that each token id writes.

    Returns:
        The bound in bytes. None if the tokeniser may drop text, because then there is no bound.
    """
    model = fields["model"]
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
        or not all(map(_preserves_text, splitters))
        or any(token.lstrip or token.rstrip for token in added)
        or shrink is None
    ):
        return None
    sizes = [len(token) for token in spelled]
    if not byte_level:  # SentencePiece's `▁` writes a space, but a text may contain `▁` itself
        sizes += [len(token.encode()) for token in vocabulary]
    # Normalisation can lengthen an added token: a space of 1 byte becomes a `▁` of 3.
    sizes += [3 * len(token.content.encode()) for token in added if token.normalized]
    return shrink * max(sizes)


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Returns the steps of a normaliser or pre-tokeniser, with nested sequences flattened."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[inner] for step in _steps(each, inner)]


def _shrink(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns the largest factor by which normalisers shorten a text; None if unbounded."""
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


def _preserves_text(splitter: Mapping[str, Any]) -> bool:
    """Whether a pre-tokeniser preserves all text."""
    return splitter["type"] in SPLITTERS and splitter.get("behavior") != "Removed"
