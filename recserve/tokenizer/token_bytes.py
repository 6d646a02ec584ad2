"""Bytes that each token of a vocabulary writes.

A character can span several tokens, so a token is a byte string and not text. Two families are
supported:

- Byte-level BPE (GPT-2, Llama 3, Qwen) spells bytes in an alphabet of printable characters.
- SentencePiece BPE (Llama 2) writes a space as `▁` and a byte as `<0xE2>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class UnsupportedTokenizer(ValueError):
    """tokenizer.json is missing, invalid or needs an unsupported feature."""


def token_bytes(fields: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[bytes]:
    """Returns the bytes of every token id up to the largest; empty for unused ids.

    Args:
        fields: Contents of tokenizer.json.
        vocabulary: Token id of each token, added tokens included.

    Raises:
        UnsupportedTokenizer: If the decoder belongs to another family.
    """
    added = {token["content"] for token in fields.get("added_tokens") or ()}
    kinds = _decoders(fields.get("decoder"))
    if "ByteLevel" in kinds:
        spell = _byte_level
    elif kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"} and kinds:
        spell = _sentence_piece
    else:
        raise UnsupportedTokenizer(
            f"the decoder of tokenizer.json is {' + '.join(sorted(kinds)) or 'missing'}; only "
            "byte-level BPE and SentencePiece with byte fallback are supported"
        )
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        table[number] = token.encode() if token in added else spell(token)
    return table


def shown(token: bytes) -> str:
    """Returns a single token as text; bytes that are no character appear as `\\xe2`."""
    return token.decode("utf-8", "backslashreplace")


def _decoders(decoder: Mapping[str, Any] | None) -> set[str]:
    """Returns the type names of a decoder and of all decoders inside it."""
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_decoders(inner) for inner in decoder["decoders"]))
    return {decoder["type"]}


def _alphabet() -> dict[str, int]:
    """Returns the byte of each printable character of byte-level BPE.

    A printable byte is spelled as itself, the others as the characters from U+0100 on.

    Source: Radford et al. 2019, section 2.2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _alphabet()
ALPHABET = frozenset(_BYTE_OF)


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE.match(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


def spelled(table: Sequence[bytes], token: int) -> bytes:
    """Returns the bytes of a token; none for an id that the tokeniser does not have."""
    return table[token] if token < len(table) else b""
