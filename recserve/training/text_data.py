"""Plain text as training data: read, tokenised, cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
PIECE = 1 << 20
MAX_BYTES = 1 << 30


def read_text(path: Path, most: int = MAX_BYTES) -> Iterator[str]:
    """Pieces of a UTF-8 file, `.zst` files unpacked, at most `most` bytes of text in all.

    A piece ends at a line's end. Raises FileNotFoundError, or ValueError for what is not UTF-8.
    """
    compression = "zstd" if path.suffix == ".zst" else None
    with path.open("rb") as raw, pa.input_stream(raw, compression=compression) as file:
        rest, read = b"", 0
        while read < most and (piece := file.read(min(PIECE, most - read))):
            read += len(piece)
            whole, newline, rest_of = (rest + piece).rpartition(b"\n")
            rest = rest_of
            if newline:
                yield _decoded(whole + newline, path)
        if rest:
            yield _decoded(rest, path, cut=read >= most)


def _decoded(data: bytes, path: Path, cut: bool = False) -> str:
    try:
        return data.decode("utf-8", "ignore" if cut else "strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def train_tokenizer(pieces: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE in the manner of GPT-2, END_OF_TEXT its first token; every text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def encode_text(tokenizer: Tokenizer, pieces: Iterator[str]) -> NDArray[np.int32]:
    """[n] tokens of all pieces, one after another."""
    encoded = [
        np.array(tokenizer.encode(piece, add_special_tokens=False).ids, np.int32)
        for piece in pieces
    ]
    return np.concatenate(encoded) if encoded else np.zeros(0, np.int32)


@dataclass(frozen=True)
class Blocks:
    """Windows of length + 1 tokens: inputs and, moved by one, targets. tokens [n] int32."""

    tokens: NDArray[np.int32]
    length: int

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.length:
            raise ValueError(
                f"the text has {len(self.tokens)} tokens; a block needs {self.length + 1}"
            )

    def drawn(self, count: int, seed: int) -> NDArray[np.int64]:
        """[count, length + 1] windows at drawn places."""
        last = len(self.tokens) - self.length
        starts = np.random.default_rng(seed).integers(0, last, count)
        return self._at(starts)

    def spread(self, count: int) -> NDArray[np.int64]:
        """[<= count, length + 1] windows without overlap, evenly spread over the text."""
        whole = (len(self.tokens) - 1) // self.length
        places = np.unique(np.linspace(0, whole - 1, min(count, whole)).astype(np.int64))
        return self._at(places * self.length)

    def _at(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        places = starts[:, None] + np.arange(self.length + 1)
        windows: NDArray[np.int64] = self.tokens[places].astype(np.int64)
        return windows
