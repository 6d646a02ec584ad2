"""Compiles the constraints of requests: bounded, cached by their text, and refused by name."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from recserve.core.constraint import Choices, Constraint, Grammar
from recserve.schemas.items import InvalidRequest, UnsupportedField
from recserve.service.errors import Uncompiled
from recserve.service.text.constraints.allowed import AllowedConstraint
from recserve.service.text.constraints.choices import (
    ChoiceTrie,
    UnspelledChoice,
    encode_choices,
)
from recserve.service.text.constraints.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    UnfitGrammar,
)
from recserve.tokenizer.tokenizer import TextTokenizer

Compiled = CompiledGrammar | ChoiceTrie
MAX_CACHED = 64  # a grammar whose texts have met many states takes up to 20 MB
MAX_CACHED_BYTES = 256 << 20


class ConstraintCompiler:
    """Compiles constraints for one model, one at a time.

    A call takes up to a second, so it belongs to a thread that nobody else waits for. What
    compiled, and what was refused, is cached by its text.
    """

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, end_tokens: tuple[int, ...]
    ) -> None:
        self.tokenizer, self.vocab_size, self.end_tokens = tokenizer, vocab_size, end_tokens
        self._grammars: GrammarCompiler | None = None
        self._compiling, self._lock = threading.Lock(), threading.Lock()
        self._cache: OrderedDict[Grammar | Choices, tuple[Compiled | UnfitGrammar, int]] = (
            OrderedDict()
        )
        self._num_bytes = 0

    def compile(
        self,
        param: str,
        wanted: Grammar | Choices | None,
        allowed: Sequence[int] | None = None,
        cached: bool = False,
    ) -> Constraint:
        """Returns the constraint of a request.

        Args:
            param: Field of the request that gave it, for errors.
            wanted: What the text may be; None leaves it free.
            allowed: Tokens that the text may have; None means all.
            cached: Whether to compile nothing.

        Raises:
            Uncompiled: If it is not in the cache, but has to be.
            InvalidRequest: If the constraint is invalid, or not all of it would be enforced. Its
                field has the path inside the grammar.
        """
        if not self.end_tokens:
            raise UnsupportedField(param, "this model names no end token; its texts cannot end")
        found = None if wanted is None else self._look_up(wanted)
        if found is None and wanted is not None:
            if cached:
                raise Uncompiled(partial(self._compile_once, wanted), max(1, _length(wanted)))
            found = self._compile_once(wanted)
        if isinstance(found, UnfitGrammar):
            raise InvalidRequest(f"{param}{found.path}", str(found))
        if allowed is not None:
            return AllowedConstraint(allowed, self.vocab_size, found)
        assert found is not None, "a constraint, or allowed tokens"
        return found

    def _compile_once(self, wanted: Grammar | Choices) -> Compiled | UnfitGrammar:
        with self._compiling:
            found = self._look_up(wanted)  # another thread may have compiled it meanwhile
            if found is None:
                try:
                    found = self._compile(wanted)
                except UnfitGrammar as error:
                    found = error
                self._store(wanted, found)
        return found

    def _look_up(self, wanted: Grammar | Choices) -> Compiled | UnfitGrammar | None:
        with self._lock:
            found = self._cache.get(wanted)
            if found is None:
                return None
            self._cache.move_to_end(wanted)
            return found[0]

    def _store(self, wanted: Grammar | Choices, found: Compiled | UnfitGrammar) -> None:
        size = 1024 + _length(wanted) * 4
        if not isinstance(found, UnfitGrammar):
            size += found.num_bytes
        with self._lock:
            self._cache[wanted] = found, size
            self._num_bytes += size
            while len(self._cache) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
                self._num_bytes -= self._cache.popitem(last=False)[1][1]

    def _compile(self, wanted: Grammar | Choices) -> Compiled:
        if isinstance(wanted, Choices):
            return self._trie(wanted)
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.end_tokens)
        return self._grammars.compile(wanted)

    def _trie(self, choices: Choices) -> ChoiceTrie:
        """Returns the trie of the choices' tokens.

        Raises:
            UnfitGrammar: If no tokens write a choice.
        """
        try:
            tokens, lengths = encode_choices(choices.texts, self.tokenizer)
        except UnspelledChoice as error:
            raise UnfitGrammar(f"[{error.place}]", str(error)) from None
        return ChoiceTrie(tokens, lengths, self.vocab_size, self.end_tokens)


def _length(wanted: Grammar | Choices) -> int:
    """Returns how many characters a constraint has."""
    return len(wanted.text) if isinstance(wanted, Grammar) else sum(map(len, wanted.texts))
