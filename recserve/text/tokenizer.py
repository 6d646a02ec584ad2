"""Tokenizers from a model folder: tokenizer.json, and what tokenizer_config.json says beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


@dataclass(frozen=True)
class Tokenizer:
    """Text to token numbers and back.

    special: texts of the special tokens by role, such as bos_token. chat_template: Jinja source,
    None where the model has none.
    """

    backend: tokenizers.Tokenizer
    special: dict[str, str]
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token numbers. special: with what the tokenizer puts around a text, such as BOS."""
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Seq[int], special: bool = False) -> str:
        """Text of tokens. special: special tokens are spelt out instead of left out."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=not special))

    def token(self, text: str) -> int | None:
        """Number of the token that is spelt so, None if there is none."""
        found: int | None = self.backend.token_to_id(text)
        return found


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises ValueError where tokenizer.json is missing.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{folder.name} has no tokenizer.json; other formats are not read")
    fields = _fields(folder / "tokenizer_config.json")
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in fields.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    template = fields.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    separate = folder / "chat_template.jinja"
    if separate.exists():
        template = separate.read_text(encoding="utf-8")
    return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), special, template)


def train_tokenizer(texts: Iterable[str], vocab_size: int, end: str) -> Tokenizer:
    """A byte-level BPE of exactly what the texts hold; token 0 is `end`, which no text spells.

    Raises ValueError where the texts do not give so many tokens.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    made = Tokenizer(backend, {"bos_token": end, "eos_token": end})
    if made.vocab_size != vocab_size:
        raise ValueError(
            f"the text gives {made.vocab_size} tokens, not {vocab_size}; give more text or ask for "
            "a smaller vocabulary"
        )
    return made


def _fields(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
