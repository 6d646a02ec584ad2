"""`recserve train lm` and `train medusa`: language models and what drafts for them, from text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from recserve.training.options import TrainOptions, TrainReport

TextModel = Literal["lm", "medusa"]


def train_from_text(
    model: TextModel, texts: list[Path] | None, out: Path | None, llm: Path | None, o: TrainOptions
) -> TrainReport:
    """Train what `model` names. llm: the folder it drafts for; `lm` without one stands alone.

    Raises BadParameter for a flag that is missing.
    """
    from recserve.models.loading import load_language_model
    from recserve.tokenizer.tokenizer import TextTokenizer
    from recserve.training.text.language_model import (
        BOOKS,
        DRAFT,
        encode,
        read_texts,
        train_language_model,
    )
    from recserve.training.text.medusa import train_medusa

    if not texts or out is None:
        raise typer.BadParameter(f"train {model} needs --text and --out")
    if llm is None:
        if model == "medusa":
            raise typer.BadParameter("train medusa needs --llm, the model that the heads read")
        return train_language_model(list(read_texts(texts)), out, o, BOOKS)
    if not llm.is_dir():
        raise typer.BadParameter(f"--llm: there is no folder {llm}")
    tokenizer, read = TextTokenizer.open(llm).tokenizer, list(read_texts(texts))
    if model == "lm":
        return train_language_model(read, out, o, DRAFT, tokenizer=tokenizer)
    tokens = encode(tokenizer, read)
    kept = len(tokens) // 20
    target = load_language_model(llm, device=o.torch_device())
    return train_medusa(target, tokens[:-kept], tokens[-kept:], out, o)
