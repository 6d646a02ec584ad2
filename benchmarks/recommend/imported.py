"""Measures a slate of an imported recommender beside the inference of the project it comes from.

    python -m benchmarks.recommend.imported                  # Qwen2 0.5B, float32 and bfloat16
    python -m benchmarks.recommend.imported --shape small    # seconds, to see that it runs

The checkpoint has the shape of Qwen2-0.5B, drawn weights, and the layout of MiniOneRec. The
original is `generate` of transformers with a processor of logits that masks each beam by a table
of what may follow, as MiniOneRec's evaluation does. Ours is the imported bundle, asked through the
service. Both answer the same drawn histories with the same beams, in turns within one process, so
that they meet the same load. The run fails if float32 slates differ.

`cold` is a history that nobody has asked for, `warm` the same one again, `event` the same one with
one more item. Prints medians of the clock and of the process's CPU time, and how many times faster
than the original each is.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.support.report import Report, options_of
from benchmarks.support.runs import CLOCKS
from recserve.formats.checkpoint_format import ImportOptions
from recserve.formats.conversion import import_checkpoint
from recserve.formats.minionerec import QUESTION, TASK
from recserve.models.loading import DTYPES
from recserve.schemas.items import Exclusions, RecommendRequest
from recserve.service import Service, ServiceOptions

# hidden, layers, heads, key heads, feed-forward, rows of the vocabulary
SHAPES = {
    "0.5b": (896, 24, 14, 2, 4864, 151_936),
    "small": (128, 2, 4, 2, 256, 4_096),
}
CODES, LEVELS = 256, 3
FORBIDDEN = -1e6
MAX_HISTORY = 50
END = "<|im_end|>"
METHODS = ("original", "cold", "event", "warm")


class Checkpoint:
    """A folder as MiniOneRec leaves it, with its items and their ids."""

    def __init__(self, root: Path, shape: str, num_items: int) -> None:
        draw = np.random.default_rng(0)
        codes = draw.integers(0, CODES, (num_items, LEVELS)).tolist()
        self.folder, self.items, self.map = root / "model", root / "items.parquet", root / "m.json"
        self.ids = [[f"<{x}_{code}>" for x, code in zip("abc", one, strict=True)] for one in codes]
        self.folder.mkdir()
        names = list(map(str, range(num_items)))
        pq.write_table(pa.table({"item_id": names, "title": names}), self.items)
        self.map.write_text(json.dumps(dict(zip(names, self.ids, strict=True))))
        self.tokenizer = self._write_tokenizer()
        hidden, layers, heads, groups, inner, rows = SHAPES[shape]
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=rows,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            intermediate_size=inner,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=self.tokenizer.token_to_id(END),
            bos_token_id=None,
        )
        Qwen2ForCausalLM(config).save_pretrained(self.folder)

    def _write_tokenizer(self) -> Tokenizer:
        """Writes a tokeniser that has a token for each word of the prompt, as Qwen's has."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet)
        tokenizer.train_from_iterator([TASK, QUESTION], trainer)
        tokenizer.add_special_tokens([AddedToken(END)])
        tokenizer.add_tokens(sorted({code for one in self.ids for code in one}))
        tokenizer.save(str(self.folder / "tokenizer.json"))
        fields = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(fields))
        return tokenizer

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def prompt(self, history: list[int]) -> list[int]:
        """Returns the tokens of a prompt, whose two parts are tokenised separately."""
        items = ", ".join("".join(self.ids[item]) for item in history)
        return self.encode(TASK) + self.encode(QUESTION.format(history=items))


class TableProcessor(LogitsProcessor):
    """Adds a large negative number to all tokens but those that a table has after a beam's codes.

    The table is asked for each beam of each step, as in the original.
    """

    def __init__(self, following: dict[tuple[int, ...], list[int]], prompt: int) -> None:
        self.following = following
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Masks scores [beams, V] of beams [beams, n]."""
        scores = scores.log_softmax(-1)
        mask = torch.full_like(scores, FORBIDDEN)
        for row, beam in enumerate(input_ids):
            mask[row, self.following.get(tuple(beam[self.prompt :].tolist()), [])] = 0
        return scores + mask


class Original:
    """The original's inference: `generate` with as many beams as answers."""

    def __init__(self, checkpoint: Checkpoint, beams: int, dtype: torch.dtype) -> None:
        self.checkpoint, self.beams = checkpoint, beams
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype)
        self.end = checkpoint.encode(END)[0]
        following: dict[tuple[int, ...], set[int]] = {}
        self.items: dict[tuple[int, ...], str] = {}
        for item, texts in enumerate(checkpoint.ids):
            tokens = [*checkpoint.encode("".join(texts) + "\n"), self.end]
            self.items.setdefault(tuple(tokens), str(item))
            for place, token in enumerate(tokens):
                following.setdefault(tuple(tokens[:place]), set()).add(token)
        self.following = {key: sorted(tokens) for key, tokens in following.items()}

    @torch.inference_mode()
    def __call__(self, history: list[int]) -> tuple[list[str], np.ndarray]:
        """Returns items and scores, best first."""
        prompt = torch.tensor([self.checkpoint.prompt(history)])
        processor = TableProcessor(self.following, prompt.shape[1])
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=self.beams,
            num_return_sequences=self.beams,
            max_new_tokens=256,
            length_penalty=0.0,
            do_sample=False,
            pad_token_id=self.end,
            eos_token_id=self.end,
            logits_processor=LogitsProcessorList([processor]),
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = (tuple(row[prompt.shape[1] :][: LEVELS + 2].tolist()) for row in out.sequences)
        return [self.items.get(one, "") for one in found], out.sequences_scores.float().numpy()


def recommender(
    service: Service, beams: int
) -> Callable[[list[int]], tuple[list[str], np.ndarray]]:
    """Returns what asks a service for the slate of a history."""

    def ask(history: list[int]) -> tuple[list[str], np.ndarray]:
        request = RecommendRequest(
            history=list(map(str, history)),
            k=beams,
            beam_width=beams,
            exclude=Exclusions(seen=False),
        )
        answer = service.recommend(request)
        return [one.item_id for one in answer.items], np.array([one.score for one in answer.items])

    return ask


def run(
    checkpoint: Checkpoint, bundle: Path, root: Path, dtype: str, options: Any
) -> tuple[dict[str, dict[str, list[float]]], float, float]:
    """Returns the seconds of all methods by clock, the share of equal items, and the largest
    difference of scores at equal places.
    """
    times: dict[str, dict[str, list[float]]] = {c: {m: [] for m in METHODS} for c in CLOCKS}
    original = Original(checkpoint, options.beams, DTYPES["bfloat16" if dtype == "int8" else dtype])
    settings = ServiceOptions(
        journal=root / f"journal-{dtype}",
        dtype="bfloat16" if dtype != "float32" else "float32",
        weights="int8" if dtype == "int8" else None,
    )
    draw, equal, apart = np.random.default_rng(1), list[float](), 0.0
    with Service.open(bundle, f"lmdb:{root}/store-{dtype}", "cpu", settings) as service:
        ours = recommender(service, options.beams)
        for number in range(options.repeats + 1):  # the first one warms up
            history = draw.integers(0, len(checkpoint.ids), options.history).tolist()
            found = {}
            longer = [*history, int(draw.integers(len(checkpoint.ids)))]
            calls: dict[str, Callable[[], Any]] = {
                "cold": lambda h=history: ours(h),  # type: ignore[misc]
                "warm": lambda h=history: ours(h),  # type: ignore[misc]
                "event": lambda h=longer: ours(h),  # type: ignore[misc]
                "original": lambda h=history: original(h),  # type: ignore[misc]
            }
            for name, call in calls.items():
                began = {clock: now() for clock, now in CLOCKS.items()}
                found[name] = call()
                for clock, now in CLOCKS.items():
                    if number:
                        times[clock][name].append(now() - began[clock])
            (theirs, scores), (own, own_scores) = found["original"], found["cold"]
            assert found["warm"][0] == own
            equal.append(float(np.mean([a == b for a, b in zip(theirs, own, strict=True)])))
            apart = max(apart, float(np.abs(scores - own_scores).max()))
    return times, float(np.mean(equal)), apart


def main() -> int:
    parser = options_of(__doc__, budget_s=0.0, repeats=3, every_cell=False)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--items", type=int, default=3_686, help="items of the catalogue")
    parser.add_argument("--history", type=int, default=20, help="items of a history")
    parser.add_argument("--beams", type=int, default=50)
    options = parser.parse_args()
    report, same = Report(options), True
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        checkpoint = Checkpoint(root, options.shape, options.items)
        tokens = len(checkpoint.prompt([0] * options.history))
        bundle = root / "bundle"
        import_checkpoint(
            ImportOptions(
                folder=checkpoint.folder,
                items=checkpoint.items,
                ids=checkpoint.map,
                out=bundle,
                format="minionerec",
                shared_ids="first",
                max_history=MAX_HISTORY,
            ),
            report.console.print,
        )
        for dtype in options.dtypes:
            times, equal, apart = run(checkpoint, bundle, root, dtype, options)
            middle = {
                clock: {name: float(np.median(taken)) for name, taken in found.items()}
                for clock, found in times.items()
            }
            title = f"{options.shape}, {dtype}, {options.beams} beams, prompts of {tokens} tokens"
            table = Table(title=title, title_justify="left")
            for column in ("", "ms", "times faster", "CPU ms", "times less"):
                table.add_column(column, justify="right" if column else "left")
            for method in METHODS:
                cells = []
                for clock in CLOCKS:
                    own = middle[clock][method]
                    cells += [f"{own * 1e3:,.1f}", f"{middle[clock]['original'] / own:,.1f}"]
                table.add_row(method, *cells)
            report.console.print(table)
            report.console.print(f"  items equal {equal:.1%}, scores within {apart:.1e}")
            same &= dtype != "float32" or (equal > 0.9 and apart < 1e-3)
            cell = {"dtype": dtype, "tokens": tokens, "times_s": times}
            report.add([cell | {"equal": equal, "apart": apart}])
    if not same:
        report.console.print("[red]slates differ[/red]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
