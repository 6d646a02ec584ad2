"""What each token of a vocabulary writes.

A character can span several tokens, so a token writes bytes and not text. The decoder of
tokenizer.json says how tokens are joined. Three families of decoders are read:

- Byte-level BPE (GPT-2, Llama 3, Qwen) spells bytes in an alphabet of printable characters.
- SentencePiece (Llama 2, Gemma, T5) writes a space as `▁` and a byte as `<0xE2>`. Most of its
  decoders leave out the space before the first word.
- WordPiece (BERT) writes a space before each token but the first and those that begin with `##`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
MAX_CHARACTER_BYTES = 4
_ELEMENTWISE = frozenset({"Replace", "Metaspace", "WordPiece", "Strip"})
_AFTER_BYTES = frozenset({"Replace", "Metaspace"})
# Steps in which the first token of a text differs from the others.
_FIRST_DIFFERS = frozenset({"Metaspace", "WordPiece"})


class UnsupportedTokenizer(ValueError):
    """A file of the tokenizer is missing, invalid or needs an unsupported feature."""


@dataclass(frozen=True)
class Spelling:
    """What tokens write.

    Attributes:
        texts: Bytes that each token id writes inside a text. None for special tokens, and for ids
            that the tokenizer lacks.
        first: Bytes of the tokens that write something else at the start of a text, by id.
        bytes_only: Ids of tokens that are one byte of a character, such as `<0xE2>`. If a run of
            them is no text, each of them writes U+FFFD.
        stripped: Character that the start of a text loses; empty for none.
        num_stripped: Most characters that it loses.
        cleans: Whether spaces before punctuation are left out, as in `clean_up`.
    """

    texts: tuple[bytes, ...]
    first: Mapping[int, bytes]
    bytes_only: frozenset[int] = frozenset()
    stripped: str = ""
    num_stripped: int = 0
    cleans: bool = False

    def without(self, tokens: Collection[int]) -> Spelling:
        """Returns the same for texts that leave out some tokens."""
        hidden = frozenset(tokens)
        return replace(
            self,
            texts=tuple(b"" if n in hidden else text for n, text in enumerate(self.texts)),
            first={n: text for n, text in self.first.items() if n not in hidden},
            bytes_only=self.bytes_only - hidden,
        )

    def is_begun(self, tokens: Sequence[int]) -> bool:
        """Returns whether text that follows these tokens stands inside a text.

        The answer is True wherever the start of a text makes no difference.
        """
        if not self.first and not self.num_stripped:
            return True
        size = len(self.texts)
        return any(token < size and (self.texts[token] or token in self.first) for token in tokens)

    def num_open(self, tokens: Sequence[int]) -> int:
        """Returns how many of the last tokens end in a character that is not complete."""
        tail = b""
        for num, token in enumerate(reversed(tokens[-MAX_CHARACTER_BYTES:]), 1):
            tail = bytes_of_token(self.texts, token) + tail
            decoder = codecs.getincrementaldecoder("utf-8")()
            try:
                decoder.decode(tail)
            except UnicodeDecodeError:  # the character begins in an earlier token
                continue
            return num if decoder.getstate()[0] else 0
        return 0


def token_bytes(decoder: Mapping[str, Any] | None, tokens: Mapping[int, str]) -> Spelling:
    """Returns what every token id up to the largest writes, special tokens included.

    Args:
        decoder: The decoder of tokenizer.json.
        tokens: All tokens by id, added tokens included.

    Raises:
        UnsupportedTokenizer: If the decoder belongs to another family.
    """
    steps = _steps(decoder)
    kinds = [str(step["type"]) for step in steps]
    table = [b""] * (max(tokens, default=-1) + 1)
    if kinds == ["ByteLevel"]:
        for number, token in tokens.items():
            table[number] = _byte_level(token)
        return Spelling(tuple(table), {})
    stripped, num_stripped = "", 0
    if "Fuse" in kinds:
        place = kinds.index("Fuse")
        after, steps, kinds = steps[place + 1 :], steps[:place], kinds[:place]
        if after:
            one_strip = len(after) == 1 and after[0]["type"] == "Strip" and not after[0]["stop"]
            if not one_strip:
                raise _decoder_error(decoder)
            stripped, num_stripped = str(after[0]["content"]), int(after[0]["start"])
    falls_back = "ByteFallback" in kinds
    if falls_back:
        place = kinds.index("ByteFallback")
        if not _AFTER_BYTES.issuperset(kinds[place + 1 :]):
            raise _decoder_error(decoder)
        steps, kinds = steps[:place] + steps[place + 1 :], kinds[:place] + kinds[place + 1 :]
    if not _ELEMENTWISE.issuperset(kinds):
        raise _decoder_error(decoder)
    bytes_only = {}
    if falls_back:
        bytes_only = {n: m[1] for n, token in tokens.items() if (m := _BYTE.match(token))}
    words = {n: token for n, token in tokens.items() if n not in bytes_only}
    join = _joiner(steps if decoder is not None else None)
    for number, text in zip(words, _inside(words.values(), join), strict=True):
        table[number] = text.encode()
    first: dict[int, bytes] = {}
    if decoder is None or not _FIRST_DIFFERS.isdisjoint(kinds):
        for number, token in words.items():
            if (begin := join([token]).encode()) != table[number]:
                first[number] = begin
    for number, digits in bytes_only.items():
        table[number] = bytes([int(digits, 16)])
    return Spelling(tuple(table), first, frozenset(bytes_only), stripped, num_stripped)


def clean_up(text: str) -> str:
    """Returns a text without the spaces before punctuation, as transformers cleans it."""
    for spaced in (" .", " ?", " !", " ,"):
        text = text.replace(spaced, spaced[1:])
    text = text.replace(" ' ", "'")
    for spaced in (" n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced[1:])
    return text


def format_token(token: bytes) -> str:
    """Returns a single token as text; bytes that are no character appear as `\\xe2`."""
    return token.decode("utf-8", "backslashreplace")


def bytes_of_token(table: Sequence[bytes], token: int) -> bytes:
    """Returns the bytes of a token; none for an id that the tokeniser does not have."""
    return table[token] if token < len(table) else b""


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Returns the steps of a decoder, with nested sequences flattened."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _decoder_error(decoder: Mapping[str, Any] | None) -> UnsupportedTokenizer:
    kinds = " + ".join(str(step["type"]) for step in _steps(decoder))
    return UnsupportedTokenizer(
        f"the decoder of tokenizer.json is {kinds}; supported are ByteLevel, WordPiece, and the "
        "decoders of SentencePiece: Replace, Metaspace and ByteFallback, then Fuse and a Strip of "
        "the start"
    )


def _joiner(steps: Sequence[Mapping[str, Any]] | None) -> Callable[[list[str]], str]:
    """Returns what joins tokens by the steps of a decoder; None joins them by spaces."""
    if steps is None:
        return " ".join
    decoder = {"type": "Sequence", "decoders": list(steps)}
    decode: Callable[[list[str]], str] = _empty_tokenizer(decoder).decoder.decode
    return decode


def _empty_tokenizer(decoder: Mapping[str, Any]) -> Tokenizer:
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    parts = ("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding")
    fields = {"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model}
    return Tokenizer.from_str(json.dumps({**dict.fromkeys(parts), **fields}))


def _inside(tokens: Collection[str], join: Callable[[list[str]], str]) -> list[str]:
    """Returns the text of each token behind another one."""
    if not tokens:
        return []
    # One call joins all tokens, with a character between them that no token has.
    used = set("".join(tokens))
    mark = next(c for c in map(chr, range(0xE000, 0xF8FF)) if c not in used)
    between = join([mark, mark])[len(join([mark])) :]
    joined = join([mark, *(part for token in tokens for part in (token, mark))])
    return joined[len(join([mark])) :].split(between)[:-1]


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
