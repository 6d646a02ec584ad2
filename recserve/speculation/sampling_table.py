"""Sampling parameters of the sequences that share a step, as columns."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.speculation.sampling_params import SamplingParams

WILDCARD = -1  # matches every token in BadWords.before
NO_SEQUENCE = -1  # owner of rows that only fill the capacity


@dataclass(frozen=True)
class SamplingCapacity:
    """Capacity of the lists of a sampling table with fixed shapes.

    Attributes:
        num_entries: Most bias entries of all sequences together; also the most stop tokens.
        num_bad_words: Most bad words of all sequences together.
        bad_word_length: Most tokens of a bad word.
    """

    num_entries: int = 256
    num_bad_words: int = 64
    bad_word_length: int = 8

    def holds(self, params: Seq[SamplingParams]) -> bool:
        """Returns True if the parameters of these sequences fit."""
        words = [word for p in params for word in p.bad_words]
        return (
            sum(len(p.logit_bias) for p in params) <= self.num_entries
            and sum(len(p.stop_token_ids) for p in params if p.min_tokens) <= self.num_entries
            and len(words) <= self.num_bad_words
            and max(map(len, words), default=0) <= self.bad_word_length
        )


@dataclass(frozen=True)
class TokenEntries:
    """Values that B sequences add to the logits of single tokens, in one list.

    Attributes:
        owners: [n] number of the sequence.
        tokens: [n] token ids.
        values: [n] float32, added to the token's logit.
    """

    owners: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True)
class BadWords:
    """Token sequences whose last token may not follow the others.

    Attributes:
        owners: [n] number of the sequence.
        last: [n] the banned token.
        before: [n, width] the tokens before it, nearest first; WILDCARD fills shorter words.
    """

    owners: Tensor
    last: Tensor
    before: Tensor


@dataclass(frozen=True)
class SamplingTable:
    """Sampling parameters of B sequences. It is built once for as long as they share their steps.

    Attributes:
        temperature: [B] float32.
        top_k: [B] int64.
        top_p: [B] float32.
        min_p: [B] float32.
        repetition: [B] float32.
        presence: [B] float32.
        frequency: [B] float32.
        min_tokens: [B] int64.
        seeds: [B] int64.
        bias: Logit biases; None if no sequence has any.
        stops: Stop tokens with the value -inf, which apply before min_tokens output tokens. None if
            no sequence has any.
        bad_words: Bad words; None if no sequence has any.
        greedy: True if every sequence is greedy.
        counts: True if any sequence counts tokens.
        truncates: True if any sequence has top_k, top_p or min_p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    min_tokens: Tensor
    seeds: Tensor
    bias: TokenEntries | None
    stops: TokenEntries | None
    bad_words: BadWords | None
    greedy: bool
    counts: bool
    truncates: bool

    @property
    def plain(self) -> bool:
        """True if the logits depend on temperature and truncation only."""
        return (
            not self.counts and self.bias is None and self.stops is None and self.bad_words is None
        )

    def copy_(self, other: SamplingTable) -> None:
        """Overwrites every tensor with that of another table of the same shapes."""
        for own, new in zip(self._tensors(), other._tensors(), strict=True):
            own.copy_(new, non_blocking=True)

    def _tensors(self) -> list[Tensor]:
        tensors = [self.temperature, self.top_k, self.top_p, self.min_p, self.repetition]
        tensors += [self.presence, self.frequency, self.min_tokens, self.seeds]
        for entries in (self.bias, self.stops):
            if entries is not None:
                tensors += [entries.owners, entries.tokens, entries.values]
        if self.bad_words is not None:
            tensors += [self.bad_words.owners, self.bad_words.last, self.bad_words.before]
        return tensors


def sampling_table(
    params: Seq[SamplingParams],
    device: torch.device | str = "cpu",
    capacity: SamplingCapacity | None = None,
) -> SamplingTable:
    """Builds the table of some sequences.

    Args:
        params: Parameters of B sequences, in order.
        device: Device of the columns.
        capacity: Gives the table the shapes and flags of any parameters that fit. Its columns can
            then be overwritten with other parameters. None sizes the table for `params`.
    """

    def column(values: Iterable[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return on_device(list(values), device, dtype)

    bias = [(b, t, v) for b, p in enumerate(params) for t, v in p.logit_bias.items()]
    stops = [
        (b, t, float("-inf"))
        for b, p in enumerate(params)
        if p.min_tokens
        for t in p.stop_token_ids
    ]
    words = [(b, word) for b, p in enumerate(params) for word in p.bad_words]
    return SamplingTable(
        temperature=column(p.temperature for p in params),
        top_k=column((p.top_k for p in params), torch.int64),
        top_p=column(p.top_p for p in params),
        min_p=column(p.min_p for p in params),
        repetition=column(p.repetition_penalty for p in params),
        presence=column(p.presence_penalty for p in params),
        frequency=column(p.frequency_penalty for p in params),
        min_tokens=column((p.min_tokens for p in params), torch.int64),
        seeds=column((p.seed for p in params), torch.int64),
        bias=_entries(bias, device, capacity),
        stops=_entries(stops, device, capacity),
        bad_words=_bad_words(words, device, capacity),
        greedy=capacity is None and all(p.greedy for p in params),
        counts=capacity is not None or any(p.counts_tokens for p in params),
        truncates=capacity is not None or any(p.truncates for p in params),
    )


def _entries(
    rows: list[tuple[int, int, float]],
    device: torch.device | str,
    capacity: SamplingCapacity | None,
) -> TokenEntries | None:
    if capacity is not None:
        rows = rows + [(NO_SEQUENCE, 0, 0.0)] * (capacity.num_entries - len(rows))
    if not rows:
        return None
    owners, tokens, values = zip(*rows, strict=True)
    return TokenEntries(
        on_device(owners, device),
        on_device(tokens, device),
        on_device(values, device, torch.float32),
    )


def _bad_words(
    rows: list[tuple[int, tuple[int, ...]]],
    device: torch.device | str,
    capacity: SamplingCapacity | None,
) -> BadWords | None:
    if capacity is not None:
        rows = rows + [(NO_SEQUENCE, (0,) * capacity.bad_word_length)] * (
            capacity.num_bad_words - len(rows)
        )
    if not rows:
        return None
    width = max(len(word) for _, word in rows) - 1
    if capacity is not None:
        width = capacity.bad_word_length - 1
    # word[-2::-1] is the word without its last token, reversed.
    before = [list(word[-2::-1]) + [WILDCARD] * (width - len(word) + 1) for _, word in rows]
    return BadWords(
        on_device([owner for owner, _ in rows], device),
        on_device([word[-1] for _, word in rows], device),
        on_device(np.array(before, np.int64).reshape(len(rows), width), device),
    )
