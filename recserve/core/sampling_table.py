"""Sampling parameters of the sequences that step together, as columns."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recserve.core.text_request import SamplingParams

ANY = -1


@dataclass(frozen=True)
class TokenEntries:
    """Tokens that some of B sequences treat specially, in one list.

    owners [n]: the sequence. tokens [n]. values [n]: added to the logit of the token.
    """

    owners: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True)
class BadWords:
    """Token sequences whose last token may not follow the others.

    owners [n]: the sequence. last [n]: the banned token. before [n, width]: what stands before it,
    nearest first, ANY where the word is shorter.
    """

    owners: Tensor
    last: Tensor
    before: Tensor


@dataclass(frozen=True)
class SamplingTable:
    """Parameters of B sequences. Made once for as long as the same ones step together.

    Columns [B]. bias, stops, bad_words: None where no sequence has any; stops have value -inf and
    hold while fewer than min_tokens are written. greedy, counts, truncates: whether every sequence
    is greedy, any counts tokens, any has top_k, top_p or min_p.
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
        """Whether a row's logits depend on nothing but temperature and truncation."""
        return (
            not self.counts and self.bias is None and self.stops is None and self.bad_words is None
        )


def sampling_table(
    params: Seq[SamplingParams], device: torch.device | str = "cpu"
) -> SamplingTable:
    """The columns of some sequences, in order."""

    def column(values: Iterable[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    bias = [(b, t, v) for b, p in enumerate(params) for t, v in p.logit_bias.items()]
    stops = [
        (b, t, float("-inf"))
        for b, p in enumerate(params)
        if p.min_tokens
        for t in p.stop_token_ids
    ]
    words = [(b, word) for b, p in enumerate(params) for word in p.bad_words]
    return SamplingTable(
        column(p.temperature for p in params),
        column((p.top_k for p in params), torch.int64),
        column(p.top_p for p in params),
        column(p.min_p for p in params),
        column(p.repetition_penalty for p in params),
        column(p.presence_penalty for p in params),
        column(p.frequency_penalty for p in params),
        column((p.min_tokens for p in params), torch.int64),
        column((p.seed for p in params), torch.int64),
        _entries(bias, device),
        _entries(stops, device),
        _bad_words(words, device),
        all(p.greedy for p in params),
        any(p.counts_tokens for p in params),
        any(p.top_k or p.top_p < 1 or p.min_p for p in params if not p.greedy),
    )


def _entries(rows: list[tuple[int, int, float]], device: torch.device | str) -> TokenEntries | None:
    if not rows:
        return None
    owners, tokens, values = zip(*rows, strict=True)
    return TokenEntries(
        torch.tensor(owners, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _bad_words(
    rows: list[tuple[int, tuple[int, ...]]], device: torch.device | str
) -> BadWords | None:
    if not rows:
        return None
    width = max(len(word) for _, word in rows) - 1
    before = [list(word[-2::-1]) + [ANY] * (width - len(word) + 1) for _, word in rows]
    return BadWords(
        torch.tensor([owner for owner, _ in rows], device=device),
        torch.tensor([word[-1] for _, word in rows], device=device),
        torch.tensor(before, dtype=torch.int64, device=device).view(len(rows), width),
    )
