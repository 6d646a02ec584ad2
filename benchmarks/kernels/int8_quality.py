"""Measures the quality cost of weights in 8 bits, beside float32 and bfloat16.

    python -m benchmarks.kernels.int8_quality --llm DIR --text FILE   # perplexity and bits per byte
    python -m benchmarks.kernels.int8_quality --llm DIR               # on texts of the model itself
    python -m benchmarks.kernels.int8_quality --bundle B --users 3000 # NDCG@10 and overlap@10

With `--llm`, every format reads the same tokens in windows of `--length`. Without `--text` the
model writes them at temperature 1, and the difference in nats is the divergence from the model.
With `--bundle`, a recommender answers test users by beam search with seen items filtered. `overlap`
is the share of items that a slate of 10 has in common with that of float32. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.fp8_quality import BATCH, predictions, written
from benchmarks.support.timing import machine
from recserve.bundle.bundle import Bundle
from recserve.engine.build import EngineModels, build_engine
from recserve.evaluation.accuracy import ranks_of, slate_metrics
from recserve.evaluation.bundle_slates import BundleSlates
from recserve.evaluation.cases import leave_one_out_cases
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model
from recserve.models.packing import pack_weights
from recserve.service.model_loader import load_models
from recserve.service.snapshot import Snapshot
from recserve.tokenizer.tokenizer import TextTokenizer

CPU = torch.device("cpu")
# name: type of the activations, and format of the weights
FORMATS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8 x float32": ("float32", "int8"),
    "int8 x bfloat16": ("bfloat16", "int8"),
}


def models_of(folder: Path) -> dict[str, LanguageModel]:
    """Returns the model in every format."""
    found = {}
    for name, (dtype, stored) in FORMATS.items():
        found[name] = load_language_model(folder, getattr(torch, dtype)).eval()
        pack_weights(found[name], stored)
    return found


def windows(folder: Path, text: Path, length: int, most: int) -> tuple[list[torch.Tensor], int]:
    """Returns windows of a text's tokens, and the bytes that all of them stand for."""
    tokenizer, content = TextTokenizer.open(folder), text.read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer.encode_literal(content))
    # Each window repeats the last token of the one before, which only gives context.
    found = list(tokens.unfold(0, length, length - 1))[:most]
    read = 1 + len(found) * (length - 1)
    return found, round(len(content.encode()) * read / len(tokens))


def of_texts(folder: Path, texts: list[torch.Tensor], num_bytes: int | None) -> dict[str, Any]:
    """Returns nats per token, perplexity, and how often the likeliest token is that of float32."""
    nats, same, total = dict.fromkeys(FORMATS, 0.0), dict.fromkeys(FORMATS, 0), 0
    models = models_of(folder)
    for text in texts:
        best = None
        for name, model in models.items():
            log_p = predictions(model, text, model.tokens.weight.dtype)
            best = log_p.argmax(-1) if best is None else best
            nats[name] -= float(log_p.gather(1, text[1:, None]).sum())
            same[name] += int((log_p.argmax(-1) == best).sum())
        total += len(text) - 1
    return {
        name: {
            "tokens": total,
            "nats": nats[name] / total,
            "perplexity": math.exp(nats[name] / total),
            "bits_per_byte": None if num_bytes is None else nats[name] / math.log(2) / num_bytes,
            "same_best_token": same[name] / total,
        }
        for name in FORMATS
    }


def of_slates(folder: Path, users: int, width: int) -> dict[str, Any]:
    """Returns quality of the slates of test users, and the share that float32 shows too."""
    bundle = Bundle.open(folder)
    answers, snapshot = BundleSlates.open(bundle), Snapshot.of(bundle.catalog(), CPU)
    cases = leave_one_out_cases(bundle.events(), "test").sample(users)
    options = answers.options("beam", width, filtered=True)
    order = np.concatenate(list(cases.batches(BATCH)))
    found: dict[str, Any] = {}
    first = None
    for name, (dtype, stored) in FORMATS.items():
        models = load_models(bundle, snapshot, CPU, dtype, stored)  # type: ignore[arg-type]
        answers.slates.engine = build_engine(EngineModels(models.recommender, heads=models.heads))
        batches = [answers.slates(cases, b, 10, options) for b in cases.batches(BATCH)]
        rows = np.concatenate(batches)
        first = rows if first is None else first
        shared = [len(np.intersect1d(*pair)) for pair in zip(first, rows, strict=True)]
        metrics = slate_metrics(ranks_of(rows, cases.held[order]), (5, 10))
        found[name] = {**metrics, "overlap@10": float(np.mean(shared)) / 10}
    return {"users": len(cases), "width": width, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llm", type=Path, help="folder of a language model")
    parser.add_argument("--text", type=Path, help="UTF-8 text that the language model reads")
    parser.add_argument("--texts", type=int, default=64, help="number of texts or windows")
    parser.add_argument("--length", type=int, default=256, help="tokens in a text or window")
    parser.add_argument("--start", type=int, default=1, help="id of the token that starts a text")
    parser.add_argument("--bundle", type=Path, help="bundle with a recommender")
    parser.add_argument("--users", type=int, default=3000, help="number of users")
    parser.add_argument("--width", type=int, default=50, help="beam width")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    if not (given.llm or given.bundle):
        parser.error("--llm, --bundle or both say what to measure")
    began, content = time.monotonic(), dict[str, Any](machine=machine("cpu"))
    if given.llm:
        if given.text:
            texts, num_bytes = windows(given.llm, given.text, given.length, given.texts)
        else:
            model = load_language_model(given.llm).eval()
            texts, num_bytes = written(model, given.texts, given.length, given.start), None
        content["texts"] = of_texts(given.llm, texts, num_bytes)
    if given.bundle:
        content["slates"] = of_slates(given.bundle, given.users, given.width)
    content["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(content, indent=1))
    if given.json:
        given.json.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
