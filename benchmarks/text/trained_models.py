"""Options, prompts and drafters of the benchmarks on trained language models.

--target is a folder of `recserve train lm`. --draft is one of `train lm --llm`, and --medusa is one
of `train medusa`. --trained eagle=DIR names a folder of `train drafter`. Without --target, the
reference checkpoint stories260k is used.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from recserve.drafters.registry import build_drafter
from recserve.models.language_model import LanguageModel
from recserve.speculation.drafter import Drafter
from recserve.tokenizer.tokenizer import TextTokenizer
from recserve.training.text.language_model import read_texts

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
PLAIN = "none"


def options_of(doc: str | None, tokens: int) -> argparse.ArgumentParser:
    """Returns a parser with the common options; `tokens` is the default number per prompt."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument(
        "--target", type=Path, default=DATA / "stories260k", help="folder of the target model"
    )
    parser.add_argument("--draft", type=Path, help="folder of a draft model")
    parser.add_argument("--medusa", type=Path, help="folder of Medusa heads")
    parser.add_argument(
        "--trained", action="append", default=[], metavar="NAME=DIR", help="a drafter's folder"
    )
    parser.add_argument("--length", type=int, default=64, help="tokens in a passage of a book")
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens to write per prompt")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


def trained_drafter(name: str, target: LanguageModel, options: argparse.Namespace) -> Drafter:
    """Builds a drafter from the folders of --trained, --medusa and --draft."""
    if name in (given := dict(entry.split("=", 1) for entry in options.trained)):
        return build_drafter(name, target, [Path(given[name])])
    folders = [options.medusa] if "medusa" in name else []
    return build_drafter(name, target, folders + ([options.draft] if options.draft else []))


def drafters_of(options: argparse.Namespace) -> list[str]:
    """Returns plain decoding and the drafters of --drafters, or all that can be built."""
    names = [PLAIN, "ngram", "suffix", "lookahead"]
    if options.draft is not None:
        names += ["draft_model", "specinfer", "suffix+draft_model"]
    names += ["medusa"] if options.medusa is not None else []
    names += [entry.split("=", 1)[0] for entry in options.trained]
    wanted = options.drafters or names
    if unknown := sorted(set(wanted) - set(names)):
        raise SystemExit(f"--drafters names {unknown}; these can be built: {names}")
    return [name for name in names if name in {PLAIN, *wanted}]


def passages(tokenizer: TextTokenizer, count: int, length: int) -> list[list[int]]:
    """Returns beginnings of passages, spread over the validation books."""
    (text,) = read_texts([DATA / "text" / "valid.txt.zst"])
    places = np.linspace(0, len(text) - 20 * length, count + 1)[:-1].astype(int)
    texts = [text[text.index(" ", place) + 1 : place + 20 * length] for place in places]
    return [tokenizer.encode(part, special=False)[:length] for part in texts]


def questions(tokenizer: TextTokenizer, count: int, longest: int) -> list[list[int]]:
    """Returns Spec-Bench's first turns that are short enough, with the categories in turns."""
    by_category: dict[str, list[list[int]]] = {}
    for line in (DATA / "prompts" / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        tokens = tokenizer.encode(entry["turns"][0], special=False)
        if 0 < len(tokens) <= longest:
            by_category.setdefault(entry["category"], []).append(tokens)
    ranked = [(i, name, t) for name, own in by_category.items() for i, t in enumerate(own)]
    return [tokens for _, _, tokens in sorted(ranked)[:count]]
