"""Compares texts with drafts and concurrent texts with plain decoding alone.

    python -m benchmarks.text.lossless                                  # stories260k, fp32 and bf16
    python -m benchmarks.text.lossless --target DIR --medusa DIR --json F.json

Every drafter writes one text and eight at a time, at temperatures 0, 0.7 and 1.3. The reference is
the same text, written alone and without drafts. If a text differs, its margin is the amount by
which plain decoding preferred its own first differing token. It is the difference of logit /
temperature + noise, computed in float32. A margin of the size of a rounding error is a tie. Prints
a table of differing texts with their margins and, for comparison, the median margin of all written
tokens. The run fails if a float32 text differs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.runs import machine, write_json
from benchmarks.text.trained_models import (
    PLAIN,
    drafters_of,
    options_of,
    passages,
    questions,
    trained_drafter,
)
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.acceptance.noise import gumbel
from recserve.models.attention import DenseAttention
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model
from recserve.models.packing import pack_weights
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.tokenizer.tokenizer import TextTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Text = list[int]


@dataclass
class Cell:
    """Texts of one drafter; `margins` are those of the first differing tokens."""

    texts: int = 0
    tokens: int = 0
    margins: list[float] = field(default_factory=list)


@torch.inference_mode()
def preferences(model: LanguageModel, tokens: Text, params: SamplingParams) -> torch.Tensor:
    """Returns [n, V] float32 values that decoding maximises at positions 1 to n of the text."""
    packed = torch.tensor([tokens[:-1]])
    count = packed.shape[1]
    values = model.logits(model(packed, torch.arange(count)[None], DenseAttention())[0]).float()
    if not params.temperature:
        return values
    seeds = torch.full((count,), params.seed)
    return values / params.temperature + gumbel(seeds, torch.arange(1, count + 1), values.shape[1])


def margin(model: LanguageModel, prompt: Text, plain: Text, other: Text, params: Any) -> float:
    """Returns by how much plain decoding preferred its own first differing token."""
    place = next(i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b)
    last = preferences(model, prompt + plain[: place + 1], params)[-1]
    return float(last[plain[place]] - last[other[place]])


def typical_margin(
    model: LanguageModel, prompts: list[Text], texts: list[Text], params: list[SamplingParams]
) -> float:
    """Returns the median margin of the best over the second best token, for all written tokens."""
    gaps = []
    for prompt, text, own in zip(prompts, texts, params, strict=True):
        best = preferences(model, prompt + text, own)[len(prompt) - 1 :].topk(2).values
        gaps.append(best[:, 0] - best[:, 1])
    return float(torch.cat(gaps).median())


def write(
    engine: Engine, name: str, prompts: list[Text], params: list[SamplingParams], together: int
) -> list[Text]:
    """Writes the texts, `together` at a time."""
    texts = []
    for start in range(0, len(prompts), together):
        engine.forget_all()
        own = range(start, min(start + together, len(prompts)))
        asked: list[Any] = [
            TextQuery(np.array(prompts[i]), params[i], Speculation(name)) for i in own
        ]
        answers: list[Any] = engine.run_many(asked)
        texts += [answer.tokens.tolist() for answer in answers]
    return texts


def compare(
    options: argparse.Namespace, dtype: torch.dtype, names: list[str], prompts: list[Text]
) -> list[dict[str, Any]]:
    """Returns one row per temperature, drafter and number of concurrent texts."""
    exact = load_language_model(options.target).to(dtype).float()
    target = load_language_model(options.target).to(dtype)
    drafters = {name: trained_drafter(name, target, options) for name in names}
    pack_weights(target)
    engine = build_engine(
        EngineModels(text=target, drafters=drafters), EngineConfig(load_aware=False)
    )
    rows = []
    for temperature in options.temperatures:
        params = [
            SamplingParams(temperature=temperature, max_tokens=options.tokens, seed=seed)
            for seed in range(len(prompts))
        ]
        truth = write(engine, PLAIN, prompts, params, 1)
        typical = typical_margin(exact, prompts, truth, params)
        for together in options.together:
            for name in names:
                cell = Cell()
                texts = write(engine, name, prompts, params, together)
                for prompt, plain, other, own in zip(prompts, truth, texts, params, strict=True):
                    cell.texts += 1
                    cell.tokens += len(other)
                    if plain != other:
                        cell.margins.append(margin(exact, prompt, plain, other, own))
                rows.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "temperature": temperature,
                        "together": together,
                        "drafter": name,
                        "texts": cell.texts,
                        "tokens": cell.tokens,
                        "differ": len(cell.margins),
                        "largest_margin": max(map(abs, cell.margins), default=0.0),
                        "typical_margin": typical,
                    }
                )
    return rows


def print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints cells with a difference one by one, and the others in one line per dtype."""
    table = Table(title="texts that differ from plain decoding alone", title_justify="left")
    for name in ("dtype", "drafter", "temperature", "at once", "texts", "tokens", "differ"):
        table.add_column(name)
    table.add_column("largest margin")
    table.add_column("median margin of a token")
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if row["dtype"] == dtype]
        for row in [row for row in own if row["differ"]]:
            shown = [row[key] for key in ("drafter", "temperature", "together", "texts", "tokens")]
            margins = (f"{row['largest_margin']:.3f}", f"{row['typical_margin']:.3f}")
            table.add_row(dtype, *map(str, shown), str(row["differ"]), *margins)
        total = [sum(row[key] for row in own) for key in ("texts", "tokens", "differ")]
        table.add_row(dtype, f"all {len(own)} cells", "", "", *map(str, total), "", "")
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__, tokens=96)
    parser.add_argument("--drafters", nargs="+", help="only these and plain decoding")
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes of the weights"
    )
    parser.add_argument(
        "--temperatures",
        nargs="+",
        type=float,
        default=[0.0, 0.7, 1.3],
        help="sampling temperatures",
    )
    parser.add_argument(
        "--together", nargs="+", type=int, default=[1, 8], help="numbers of concurrent texts"
    )
    parser.add_argument(
        "--prompts", type=int, default=16, help="prompts of books and of Spec-Bench each"
    )
    return parser.parse_args()


def main() -> int:
    """Runs the comparison; returns 1 if a float32 text differs."""
    options = arguments()
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    tokenizer = TextTokenizer.open(options.target)
    room = load_language_model(options.target).config.decoder.max_positions - options.tokens
    prompts = passages(tokenizer, options.prompts, min(options.length, room))
    prompts += questions(tokenizer, options.prompts, room)
    names = drafters_of(options)
    rows = []
    for dtype in options.dtypes:
        rows += compare(options, DTYPES[dtype], names, prompts)
    content = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    console.print(content["machine"])
    print_rows(console, rows)
    if options.json:
        write_json(options.json, content | {"rows": rows})
    return int(any(row["differ"] for row in rows if row["dtype"] == "float32"))


if __name__ == "__main__":
    sys.exit(main())
