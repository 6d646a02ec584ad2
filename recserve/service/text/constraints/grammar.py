"""Texts of a JSON schema, a regular expression or a Lark grammar, by llguidance.

llguidance raises no error when a matcher meets a limit or a token that does not fit. The matcher
then allows the end of the text only, and stays so. Therefore `is_error` follows every call here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from recserve.core.constraint import ConstraintError, Grammar, num_words
from recserve.service.text.constraints.json_schema import json_options, one_line
from recserve.service.text.constraints.trial import Trials
from recserve.tokenizer.tokenizer import TextTokenizer

# A state of a lexer takes 1 to 2 kB, and a unit of fuel about .02 us to compile and .07 us to step.
LIMITS = {
    "max_items_in_row": 5000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# Attributes of rules with which a matcher cannot go back.
_ATTRIBUTES = re.compile(r"^\s*[A-Za-z_][\w-]*\s*\[([^\]\n]*)\]\s*:", re.MULTILINE)
_ONE_WAY = re.compile(r"\b(max_tokens|stop|temperature)\b")


class UnfitGrammar(ValueError):
    """A grammar that texts cannot be held to.

    Attributes:
        path: Path inside the grammar, behind the name of its field; empty for the whole grammar.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


class GrammarCompiler:
    """Compiles grammars for one tokeniser."""

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, end_tokens: tuple[int, ...]
    ) -> None:
        """Reads the tokeniser, which takes up to a second."""
        self.vocab_size, self.end_tokens = vocab_size, end_tokens
        self._tokenizer = read_tokenizer(tokenizer, vocab_size, end_tokens)
        self._limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        table = _TokenTable(tokenizer, vocab_size, end_tokens[0])
        self._trials = Trials(table.tokens, table.special_token_ids, end_tokens, LIMITS)

    def compile(self, wanted: Grammar) -> CompiledGrammar:
        """Compiles a grammar without the GIL, once it has been compiled on trial.

        Raises:
            UnfitGrammar: If the grammar is invalid, or not all of it would be enforced.
        """
        if wanted.kind == "json_schema":
            verdict = self._trials.run(wanted.text, json_options(wanted.blanks))
        elif wanted.kind == "regex":
            verdict = self._trials.run(LLMatcher.grammar_from_regex(wanted.text))
        else:
            for attributes in _ATTRIBUTES.findall(wanted.text):
                if found := _ONE_WAY.search(attributes):
                    raise UnfitGrammar("", f"the attribute {found[0]!r} of a rule is not supported")
            verdict = self._trials.run(LLMatcher.grammar_from_lark(wanted.text))
        if verdict.error:
            raise UnfitGrammar(verdict.path, verdict.error)

        def build() -> LLMatcher:
            return LLMatcher(self._tokenizer, verdict.grammar, log_level=0, limits=self._limits)

        compiled = CompiledGrammar(build, self.vocab_size, self.end_tokens, verdict.num_bytes)
        if compiled.error:
            raise UnfitGrammar("", one_line(compiled.error))
        return compiled


def read_tokenizer(
    tokenizer: TextTokenizer, vocab_size: int, end_tokens: tuple[int, ...]
) -> LLTokenizer:
    """Returns a tokeniser for llguidance, in which each token has the bytes that it writes.

    llguidance reads byte-level tokenisers itself. It knows no WordPiece, no Unigram and not all
    forms of SentencePiece. Those get the table of this package.
    """
    texts, ends = tokenizer.spelling.texts, list(end_tokens)
    try:
        made = LLTokenizer(tokenizer.tokenizer.to_str(), n_vocab=vocab_size, eos_token=ends)
    except ValueError:
        made = None
    written = b"".join([tokenizer.all_bytes[token] for token in tokenizer.encode_literal("a b")])
    if made is not None and written == b"a b":  # some tokenisers put a space before a text
        # Bytes 0xFF are in no text. Special tokens write nothing.
        same = all(
            not text or text == b"\xff" or made.decode_bytes([token]) == text
            for token, text in enumerate(texts)
        )
        if same:
            return made
    return LLTokenizer(
        TokenizerWrapper(_TokenTable(tokenizer, vocab_size, ends[0])),
        n_vocab=vocab_size,
        eos_token=ends,
    )


class _TokenTable:
    """A tokeniser as llguidance takes it from Python."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, end_token: int) -> None:
        texts, names = tokenizer.spelling.texts, tokenizer.all_bytes
        self.tokens = [names[n] if n < len(names) else b"" for n in range(vocab_size)]
        own = range(vocab_size)
        self.special_token_ids = [n for n in own if n >= len(texts) or not texts[n]]
        self.eos_token_id, self.bos_token_id = end_token, None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens that write a text."""
        return self._tokenizer.encode_inside(text) or []


class CompiledGrammar:
    """A grammar, compiled for one tokeniser.

    Copies of an `LLMatcher` share one lexer, and the states that it has met count for all of them:
    those of other texts, and of drafts. So a matcher that fails says nothing about its text.
    `restart` does, because its matcher has a lexer of its own.

    Attributes:
        end_tokens: Tokens that end a text.
        num_bytes: Memory that it takes.
    """

    def __init__(
        self,
        build: Callable[[], LLMatcher],
        vocab_size: int,
        end_tokens: tuple[int, ...],
        num_bytes: int = 0,
    ) -> None:
        self._build, self._num_words = build, num_words(vocab_size)
        self.end_tokens, self.num_bytes = end_tokens, num_bytes
        self._root = build()  # of the newest lexer

    @property
    def error(self) -> str:
        """Why the grammar is invalid; empty if it is valid."""
        return self._root.get_error()

    def start(self) -> GrammarMatcher:
        """Returns the matcher of an empty text."""
        return GrammarMatcher(self._root.deep_copy())

    def restart(self, tokens: Sequence[int]) -> GrammarMatcher:
        """Returns a matcher with a new lexer that has advanced over tokens.

        Later texts share the lexer. Building it takes no GIL.

        Raises:
            ConstraintError: If the tokens, or the mask behind them, meet a limit.
        """
        root = self._build()
        matcher = GrammarMatcher(root.deep_copy())
        for token in tokens:
            matcher.advance(token)
        matcher.fill(np.zeros(self._num_words, np.int32))
        self._root = root
        return matcher


class GrammarMatcher:
    """The place of one text in a grammar."""

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner

    def fill(self, row: NDArray[np.int32]) -> None:
        """Writes the mask of the tokens that may follow."""
        self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def forces(self) -> bool:
        """Returns whether only one token may follow, or the matcher has met a limit."""
        return bool(self._inner.compute_ff_tokens()) or self._inner.is_stopped()

    def advance(self, token: int) -> None:
        """Appends a token of the current mask."""
        self._inner.consume_token(token)
        self._check()

    def roll_back(self, count: int) -> None:
        """Removes the last tokens."""
        if count:
            self._inner.rollback(count)
            self._check()

    def fork(self) -> GrammarMatcher:
        """Returns a matcher of the same state."""
        return GrammarMatcher(self._inner.deep_copy())

    def _check(self) -> None:
        if self._inner.is_error():
            raise ConstraintError(
                f"the constraint cannot go on: {one_line(self._inner.get_error())}"
            )
