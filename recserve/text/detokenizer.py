"""Tokens to text as they come, never half a character.

A token may end inside a UTF-8 character, and what a token spells may depend on the one before it
(spaces of SentencePiece). So the newest tokens are decoded together with a few before them, and the
difference is given out once it ends in a whole character.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from recserve.text.tokenizer import Tokenizer

UNFINISHED = "\ufffd"


class Detokenizer:
    """The text of one growing list of tokens.

    The pieces given out, `finish` included, make up what decoding all tokens at once would give.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._tokens: list[int] = []
        # Tokens from `_known` on are decoded each time; those before `_given` are given out.
        self._known = 0
        self._given = 0

    def add(self, tokens: Seq[int]) -> str:
        """What the tokens add to the text so far; empty while a character is unfinished."""
        out = ""
        for token in tokens:
            self._tokens.append(token)
            piece = self._pending()
            if piece and not piece.endswith(UNFINISHED):
                out += piece
                self._known, self._given = self._given, len(self._tokens)
        return out

    def finish(self) -> str:
        """What is left: an unfinished character at the very end, as the tokenizer spells it."""
        piece = self._pending()
        self._known = self._given = len(self._tokens)
        return piece

    def _pending(self) -> str:
        before = self._decode(self._tokens[self._known : self._given])
        return self._decode(self._tokens[self._known :])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, self._special)
