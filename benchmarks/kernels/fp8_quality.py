"""Measures the quality cost of 8-bit keys and values.

    python -m benchmarks.kernels.fp8_quality --llm stories260k
    python -m benchmarks.kernels.fp8_quality --bundle B --users 3000

With `--llm`, a language model writes texts at temperature 1 with its usual cache. Prefill then
measures the nats per token of these texts with either cache. The difference is the divergence of
the two. With `--bundle`, a recommender answers test users by beam search with seen items filtered,
with either cache. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.timing import machine
from recserve.bundle.bundle import Bundle
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.runner import Runner
from recserve.evaluation.accuracy import ranks_of, slate_metrics
from recserve.evaluation.bundle_slates import BundleSlates
from recserve.evaluation.cases import leave_one_out_cases
from recserve.kernels.cache.fp8 import FP8
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.tree import chain
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.adapters import DecoderAdapter
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model
from recserve.service.model_loader import load_heads
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams

BATCH = 256


def written(model: LanguageModel, count: int, length: int, start: int) -> list[torch.Tensor]:
    """Returns texts that the model writes, with their first token."""
    requests = [
        TextQuery(np.array([start]), SamplingParams(seed=n, max_tokens=length))
        for n in range(count)
    ]
    engine = build_engine(EngineModels(text=model), EngineConfig(max_running=16))
    futures = [engine.submit(request) for request in requests]
    while engine.step():
        pass
    tokens = [[start, *future.result().tokens.tolist()] for future in futures]
    return [torch.tensor(text) for text in tokens]


@torch.inference_mode()
def predictions(model: LanguageModel, text: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns [n - 1, V] log-probabilities of the tokens after the first, with a cache of this
    dtype.
    """
    adapter = DecoderAdapter(model)
    inputs, slots = text[:-1], torch.arange(len(text) - 1)
    runner = Runner(adapter, KVPool(adapter.kv_shape, len(slots), 1, dtype))
    nothing = Prefixes.of([slots[:0]])
    piece = TreeBatch(chain(inputs), None, slots, nothing, inputs=NodeInputs(inputs))
    return model.logits(runner.forward([piece])[0]).float().log_softmax(-1)


def of_texts(folder: Path, count: int, length: int, start: int) -> dict[str, Any]:
    """Returns nats per token of the model's own texts with either cache."""
    model = load_language_model(folder).eval()
    nats: dict[str, list[float]] = {"model": [], "fp8": []}
    same = total = 0
    for text in written(model, count, length, start):
        kinds = {"model": model.tokens.weight.dtype, "fp8": FP8}
        found = {name: predictions(model, text, dtype) for name, dtype in kinds.items()}
        for name, log_p in found.items():
            nats[name].append(-float(log_p.gather(1, text[1:, None]).sum()))
        same += int((found["model"].argmax(-1) == found["fp8"].argmax(-1)).sum())
        total += len(text) - 1
    mean = {name: sum(values) / total for name, values in nats.items()}
    gaps = torch.tensor(nats["fp8"]) - torch.tensor(nats["model"])
    error = float(gaps.std()) * len(gaps) ** 0.5 / total
    shape = DecoderAdapter(model).kv_shape
    return {
        "texts": count, "tokens": total, "nats": mean, "more": mean["fp8"] - mean["model"],
        "standard_error": error, "same_best_token": same / total,
        "slot_bytes": [shape.slot_bytes(model.tokens.weight.dtype), shape.slot_bytes(FP8)],
    }  # fmt: skip


def of_slates(folder: Path, users: int, width: int) -> dict[str, Any]:
    """Returns quality and agreement of the slates of test users with either cache."""
    bundle = Bundle.open(folder)
    answers = BundleSlates.open(bundle)
    model = answers.slates.model
    cases = leave_one_out_cases(bundle.events(), "test").sample(users)
    options = answers.options("beam", width, filtered=True)
    rows, metrics = {}, {}
    for name in (None, "fp8"):
        config = EngineConfig(kv_dtype=name)
        answers.slates.engine = build_engine(
            EngineModels(model, heads=load_heads(bundle, model)), config
        )
        batches = [answers.slates(cases, b, 10, options) for b in cases.batches(BATCH)]
        order = np.concatenate(list(cases.batches(BATCH)))
        rows[name] = np.concatenate(batches)
        metrics[name or "model"] = slate_metrics(ranks_of(rows[name], cases.held[order]), (5, 10))
    shared = [len(np.intersect1d(*pair)) for pair in zip(rows[None], rows["fp8"], strict=True)]
    return {
        "users": len(cases), "width": width, "metrics": metrics,
        "shared_items": float(np.mean(shared)) / 10,
        "same_slates": float((rows[None] == rows["fp8"]).all(1).mean()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llm", type=Path, help="folder of a language model")
    parser.add_argument("--texts", type=int, default=64, help="number of texts")
    parser.add_argument("--length", type=int, default=256, help="tokens in a text")
    parser.add_argument("--start", type=int, default=1, help="id of the token that starts a text")
    parser.add_argument("--bundle", type=Path, help="bundle with a recommender")
    parser.add_argument("--users", type=int, default=3000, help="number of users")
    parser.add_argument("--width", type=int, default=50, help="beam width")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    if not (arguments.llm or arguments.bundle):
        parser.error("--llm, --bundle or both say what to measure")
    began, content = time.monotonic(), {"machine": machine("cpu")}
    if arguments.llm:
        sizes = arguments.texts, arguments.length, arguments.start
        content["texts"] = of_texts(arguments.llm, *sizes)
    if arguments.bundle:
        content["slates"] = of_slates(arguments.bundle, arguments.users, arguments.width)
    content["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(content, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
