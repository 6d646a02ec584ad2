"""What each token of a vocabulary writes, as bytes.

A character may be spread over tokens, so a token is bytes first and text only together with its
neighbours. Two families: byte-level BPE (GPT-2, Llama 3, Qwen), whose tokens spell bytes in an
alphabet of printable characters, and SentencePiece BPE (Llama 2), where `▁` is a space and `<0xE2>`
a byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class UnsupportedTokenizer(ValueError):
    """A tokenizer.json asks for something that is not done here."""


def token_bytes(fields: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[bytes]:
    """Bytes of every token number up to the largest; empty for numbers without a token.

    fields: of tokenizer.json. vocabulary: token to number, added tokens included.
    Raises UnsupportedTokenizer for a decoder of another family.
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
            "byte-level BPE and SentencePiece with byte fallback are done here"
        )
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        table[number] = token.encode() if token in added else spell(token)
    return table


def shown(token: bytes) -> str:
    """A token by itself as text; bytes that are no character are written `\\xe2`."""
    return token.decode("utf-8", "backslashreplace")


def _decoders(decoder: Mapping[str, Any] | None) -> set[str]:
    """Names of a decoder and of those inside it."""
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_decoders(inner) for inner in decoder["decoders"]))
    return {decoder["type"]}


def _alphabet() -> dict[str, int]:
    """Byte-level BPE's printable character for each byte: itself where it has one, else from 256.

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
