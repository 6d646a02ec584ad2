"""Trains a byte-level BPE tokeniser, which can encode every text."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["Tokenizer", "train_tokenizer"]


def train_tokenizer(texts: Iterable[str], vocab_size: int, end: str) -> Tokenizer:
    """Trains a byte-level BPE tokeniser without any normalisation.

    Args:
        texts: Training texts.
        vocab_size: Number of tokens, `end` and the 256 bytes included.
        end: Special token with id 0 that ends a text. No merge of plain text produces it.

    Raises:
        ValueError: If the texts yield fewer tokens than `vocab_size`.
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
            f"the text yields {found} tokens, not {vocab_size}; give more text or choose a smaller "
            "vocabulary"
        )
    return tokenizer
