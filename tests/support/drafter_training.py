"""Text that a target model writes, and how many draft tokens it accepts from a trained drafter."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.attention import DenseAttention
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.training.options import TrainReport
from recserve.training.schedule import Schedule

WINDOW, ROWS = 24, 160
FAST = Schedule(8, 1e-2, weight_decay=0.0, averaging=0.0)
PROMPTS = tuple(np.array([n]) for n in range(8))


def write_rows(model, first: torch.Tensor, length: int, temperature: float) -> torch.Tensor:
    """Returns rows [R, length] that the model continues from their first tokens [R]."""
    tokens, draws = first[:, None], torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for _ in range(length - 1):
            hidden = model(tokens, torch.arange(tokens.shape[1]), DenseAttention())
            shares = (model.logits(hidden[:, -1]) / temperature).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=draws)], 1)
    return tokens


def write_text(model, rows: int, length: int, temperature: float) -> np.ndarray:
    """Returns the text of `rows` rows that begin with different tokens, one after another."""
    first = torch.arange(rows) % model.config.vocab_size
    return write_rows(model, first, length, temperature).flatten().numpy()


def write_lengths(folder: Path, report: TrainReport) -> None:
    """Writes the accept lengths after the first epoch and at the end of a training."""
    lengths = [report.history[0].metrics["accept_length"], report.metrics["accept_length"]]
    (folder / "accept-lengths.json").write_text(json.dumps(lengths))


def read_lengths(folder: Path) -> list[float]:
    """Returns what `write_lengths` has written."""
    lengths: list[float] = json.loads((folder / "accept-lengths.json").read_text())
    return lengths


def accepted_per_draft(
    model,
    drafter,
    prompts: Sequence[Sequence[int] | np.ndarray] = PROMPTS,
    max_tokens: int = 30,
    verifier: str = "sample",
) -> float:
    """Returns accepted tokens per draft of greedy texts, and checks that drafts change no text."""
    engine = build_engine(
        EngineModels(text=model, drafters={drafter.name: drafter}), EngineConfig(load_aware=False)
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    speculation = Speculation(drafter.name, verifier=verifier)
    plain = engine.run_many([TextQuery(np.array(p), params) for p in prompts])
    drafted = engine.run_many([TextQuery(np.array(p), params, speculation) for p in prompts])
    for one, other in zip(plain, drafted, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    counts = [answer.counts for answer in drafted]
    return sum(c.num_accepted_tokens for c in counts) / sum(c.num_drafts for c in counts)
