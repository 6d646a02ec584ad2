"""Self-distillation: the target writes the text that its drafters train on.

Drafters learn most from the target's own distribution. So the target continues passages of a text,
and the token ids are saved (distilled_text.py): decoding and encoding again could change them.

A part depends on the settings and its number only. So a run that is interrupted continues, and ends
with the bytes of an uninterrupted one on the same machine.

Source: Medusa (arXiv 2401.10774), section 2.3.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from rich.console import Console

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.cache.kv_pool import KVShape
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model, read_folder
from recserve.models.packing import pack_weights
from recserve.service.text.loader import unite_end_tokens
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from recserve.tokenizer.tokenizer import TextTokenizer
from recserve.training.loop import progress_bar
from recserve.training.text.distilled_text import (
    FORMAT,
    SCHEMA,
    DistillationSettings,
    check_folder,
    claim,
    publish,
    read_distilled,
    sha256_of,
    target_sha256,
    tokenizer_sha256,
)
from recserve.training.text.language_model import encode, read_texts

LOG_EVERY_S = 10.0  # lines of progress where no bar can be drawn


@dataclass(frozen=True)
class DistillationReport:
    """Result of a run.

    Attributes:
        texts: Number of texts in the folder.
        tokens: Number of their tokens, prompts included.
        parts: Number of parts.
        resumed: How many parts were there before this run.
        seconds: Duration of this run.
    """

    texts: int
    tokens: int
    parts: int
    resumed: int
    seconds: float


class TextWriter:
    """Lets a target continue passages, in batches that do not depend on earlier ones."""

    def __init__(
        self,
        target: LanguageModel,
        corpus: NDArray[np.int64],
        prefix: Sequence[int],
        end_tokens: tuple[int, ...],
        settings: DistillationSettings,
    ) -> None:
        """Builds an engine whose pages hold a whole batch. The target is packed in place.

        Args:
            target: The language model.
            corpus: [n] int64 tokens from which passages are drawn.
            prefix: Tokens before each passage.
            end_tokens: Tokens that end a text.
            settings: What is written.

        Raises:
            ValueError: If the corpus is shorter than a passage, or a prompt has no room for one.
        """
        self.settings, self.corpus, self.prefix = settings, corpus, list(prefix)
        self.end_tokens, self.size = end_tokens, settings.prompt_tokens - len(self.prefix)
        if self.size < 1:
            raise ValueError(
                f"prompt_tokens is {settings.prompt_tokens}; the tokenizer puts {len(self.prefix)} "
                "before each text, and a passage needs at least one more"
            )
        if len(corpus) < self.size:
            raise ValueError(
                f"the text has {len(corpus)} tokens; a passage needs {self.size} of them"
            )
        pack_weights(target)
        shape, config = target.config.decoder, EngineConfig()
        slot = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        pages = settings.batch * (-(-settings.text_tokens // config.page_size) + 1)
        page_bytes = config.page_size * slot.slot_bytes(target.tokens.weight.dtype)
        config = EngineConfig(
            kv_bytes=pages * page_bytes, max_running=settings.batch, max_queue=settings.batch
        )
        self.engine = build_engine(EngineModels(text=target), config)

    def part(self, number: int, tokens: int, wrote: Callable[[int], None]) -> pa.Table:
        """Returns the texts of a part.

        Args:
            number: Number of the part.
            tokens: Least number of its tokens.
            wrote: Called after each batch with the number of its tokens.
        """
        random = np.random.default_rng((self.settings.seed, number))
        texts: list[NDArray[np.int64]] = []
        while (left := tokens - sum(map(len, texts))) > 0:
            count = min(self.settings.batch, -(-left // self.settings.text_tokens))
            batch = self._batch(random, count)
            texts += batch
            wrote(sum(map(len, batch)))
        starts = [self.settings.prompt_tokens] * len(texts)
        return pa.table([pa.array(texts), starts], schema=SCHEMA)

    def _batch(self, random: np.random.Generator, count: int) -> list[NDArray[np.int64]]:
        places = random.integers(0, len(self.corpus) - self.size + 1, count)
        seeds = random.integers(0, 2**63 - 1, count)
        prompts = [np.array([*self.prefix, *self.corpus[p : p + self.size]]) for p in places]
        self.engine.forget_all()
        futures = [
            self.engine.submit(TextQuery(prompt, self._params(int(seed))))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        while self.engine.step():
            pass
        answers = [future.result() for future in futures]
        ends = [[] if a.stop_token is None else [a.stop_token] for a in answers]
        parts = zip(prompts, answers, ends, strict=True)
        return [np.concatenate([p, a.tokens, e]).astype(np.int64) for p, a, e in parts]

    def _params(self, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.settings.temperature,
            seed=seed,
            max_tokens=self.settings.length,
            stop_token_ids=self.end_tokens,
        )


class TokenProgress:
    """Shows how many tokens are written: as a bar on a terminal, else as a line now and then."""

    def __init__(self, console: Console, total: int) -> None:
        """Starts with no tokens of `total`."""
        self.console, self.total, self.done = console, total, 0
        self.began = self.told = time.monotonic()
        self.bar = progress_bar(console)
        self.task = self.bar.add_task("writing", total=total, shown="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def add(self, tokens: int) -> None:
        """Counts more tokens."""
        self.done += tokens
        now = time.monotonic()
        speed = self.done / max(now - self.began, 1e-9)
        self.bar.update(self.task, completed=self.done, shown=f"{speed:,.0f} tokens/s")
        if not self.console.is_terminal and now - self.told > LOG_EVERY_S:
            self.told, left_s = now, max(self.total - self.done, 0) / speed
            share = f"{self.done:,} of {self.total:,} tokens"
            self.console.print(f"{share}  {speed:,.0f} tokens/s  {left_s:.0f} s left")


def distill(
    llm: Path,
    texts: Sequence[Path],
    out: Path,
    settings: DistillationSettings,
    device: torch.device,
    console: Console | None = None,
) -> DistillationReport:
    """Lets a language model continue passages, and saves the token ids.

    Args:
        llm: Folder of the language model.
        texts: Files with the text from which passages are drawn.
        out: Folder of the new text. The same call continues an interrupted run in it.
        settings: What is written.
        device: Device of the language model.
        console: Where progress is printed; None means standard error.

    Raises:
        ValueError: If the folder holds something else, a text is too short, or the model cannot
            continue the prompts.
    """
    began, console = time.monotonic(), console or Console(stderr=True)
    config, _ = read_folder(llm)
    positions, parts = config.decoder.max_positions, settings.parts()
    if settings.text_tokens > positions:
        raise ValueError(
            f"prompt_tokens and length are {settings.text_tokens} together; {llm.name} has "
            f"{positions} positions"
        )
    facts = {
        "format": FORMAT,
        "target_sha256": target_sha256(llm),
        "tokenizer_sha256": tokenizer_sha256(llm),
        "text_sha256": sha256_of(texts),
        **asdict(settings),
    }
    check_folder(out, facts)
    numbers = {name: number for number, name in enumerate(parts)}
    missing = {name: tokens for name, tokens in parts.items() if not (out / name).is_file()}
    if missing:
        tokenizer = TextTokenizer.open(llm)
        model = load_language_model(llm, device=device)
        unite_end_tokens(model, tokenizer)
        writer = TextWriter(
            model,
            encode(tokenizer.tokenizer, list(read_texts(texts))),
            tokenizer.encode(""),
            model.config.eos_tokens,
            settings,
        )
        claim(out, facts)
        done = len(parts) - len(missing)
        try:
            with TokenProgress(console, sum(missing.values())) as progress:
                for name, tokens in missing.items():
                    publish(writer.part(numbers[name], tokens, progress.add), out / name)
                    done += 1
        except KeyboardInterrupt:
            console.print(
                f"interrupted after {done} of {len(parts)} parts; the same command continues there"
            )
            raise
    found = read_distilled(out)
    return DistillationReport(
        texts=len(found.texts),
        tokens=len(found.tokens),
        parts=len(parts),
        resumed=len(parts) - len(missing),
        seconds=time.monotonic() - began,
    )
