"""Training a tokeniser: byte-level BPE, which has a token for every byte and so for every text."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["Tokenizer", "train_tokenizer"]


def train_tokenizer(texts: Iterable[str], vocab_size: int, end: str) -> Tokenizer:
    """A byte-level BPE of exactly what the texts hold; token 0 is `end`, which no text spells.

    Raises ValueError where the texts do not give so many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        raise ValueError(
            f"the text gives {found} tokens, not {vocab_size}; give more text or ask for a smaller "
            "vocabulary"
        )
    return tokenizer
