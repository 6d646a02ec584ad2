"""A language model that writes scripted text, with a real tokeniser and real threads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from recserve.core.client import LOCAL, Client
from recserve.core.errors import DeadlineExceeded, QueueFull
from recserve.core.request import Timing
from recserve.drafters.medusa.drafter import MedusaDrafter
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.drafters.none import NoDrafter
from recserve.engine.stats import EngineStats
from recserve.service import Service
from recserve.service.text.model import TextModel
from recserve.speculation.completion import (
    Completion,
    SpeculationCounts,
    TextCommit,
    TextQuery,
    TokenLogprobs,
)
from recserve.tokenizer.chat_template import ChatTemplate
from recserve.tokenizer.tokenizer import TextTokenizer

BEGIN, END = 256, 257
VOCABULARY, CONTEXT = 258, 200
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if loud %}LOUD{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(folder: Path) -> Path:
    """Writes a model folder with a tokeniser of single bytes, in which `é` takes two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


class ScriptedEngine:
    """Writes `script(prompt text, seed)` and the end token, in steps of 1, 3, 2, 1, 3, … tokens.

    Attributes:
        hold: While set, no text continues after its first step.
        full: True makes every queue full.
        failure: Exception that is raised in the step `failing_step`.
    """

    def __init__(
        self, script: Callable[[str, int], str], tokenizer: TextTokenizer, context: int = CONTEXT
    ) -> None:
        self.script = script
        self.capacity = context + 1
        self.tokenizer = tokenizer
        self.hold = threading.Event()
        self.full = False
        self.failure: Exception | None = None
        self.failing_step = 2
        self.requests: list[TextQuery] = []
        self.cancelled = 0
        self.alive = True
        self.schedulers: dict[str, object] = {}  # no networks
        self.stalled_s = 0.0
        self.stopped_by: BaseException | None = None

    def check_queue(self, models: Sequence[str], client: Client, num_ahead: int = 0) -> None:
        if self.full:
            raise QueueFull("the queue is full", 2.5)

    def submit_all(
        self, requests: Sequence[TextQuery], client: Client = LOCAL
    ) -> list[Future[Completion]]:
        if self.full:
            raise QueueFull("the queue is full", 2.5)
        self.requests += requests
        futures: list[Future[Completion]] = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            threading.Thread(target=self._run, args=(request, future), daemon=True).start()
        return futures

    def token_capacity(self, model: str) -> int:
        return self.capacity

    def close(self) -> None:
        self.alive = False

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 4, 0, 4, 0, 0)

    def _run(self, request: TextQuery, future: Future[Completion]) -> None:
        try:
            answer = self._write(request, future)
            if answer is not None:
                future.set_result(answer)
        except InvalidStateError:
            self.cancelled += 1
        except Exception as error:
            future.set_exception(error)

    def _write(self, request: TextQuery, future: Future[Completion]) -> Completion | None:
        params = request.params
        text = self.script(self.tokenizer.decode(request.prompt.tolist()), params.seed)
        tokens = self.tokenizer.encode(text, special=False)
        ends = END in params.stop_token_ids and len(tokens) < params.max_tokens
        tokens = tokens[: params.max_tokens]
        counts = SpeculationCounts()
        start = step = 0
        while True:
            if step == 1:
                while self.hold.is_set() and not future.cancelled():
                    time.sleep(0.005)
            if future.cancelled():
                self.cancelled += 1
                return None
            if request.deadline_s is not None and time.monotonic() > request.deadline_s:
                raise DeadlineExceeded("the deadline passed while the request ran")
            if step == self.failing_step and self.failure is not None:
                raise self.failure
            size = (1, 3, 2)[step % 3]
            part = tokens[start : start + size]
            start, step = start + len(part), step + 1
            last = start >= len(tokens)
            if request.speculation.drafter != "none":
                counts.add(4, len(part) - 1 if part else 0)
            rows = tuple(likely(token, params.logprobs) for token in part)
            reason = ("stop" if ends else "length") if last else None
            commit = TextCommit(
                tokens=tuple(part),
                logprobs=rows if params.logprobs is not None else (),
                finish_reason=reason,
                num_accepted=0 if request.speculation.drafter == "none" else max(len(part) - 1, 0),
                num_draft_tokens=0 if request.speculation.drafter == "none" else 4,
                num_draft_levels=4,
            )
            stopped = bool(request.on_commit and request.on_commit(commit))
            if stopped or last:
                return Completion(
                    np.array(tokens[:start]),
                    "stop" if stopped else reason,
                    END if ends and not stopped else None,
                    counts=counts,
                    timing=Timing(prefix_cached=len(request.prompt) // 2),
                )


def likely(token: int, count: int | None) -> TokenLogprobs:
    """Returns log-probabilities with `#` as the most likely token and `token` as the second."""
    sharp = [2, token, 30, 31, 32][: count or 0]
    return TokenLogprobs(-1.5, tuple(sharp), tuple(-0.5 - place for place in range(len(sharp))))


def scripted(
    folder: Path,
    script: Callable[[str, int], str],
    template: bool = True,
    source: str | None = None,
    context: int = CONTEXT,
) -> Service:
    """Returns a service with a scripted model called `toy`; `source` is another template."""
    byte_tokenizer(folder)
    tokenizer = TextTokenizer.open(folder)
    if not template:
        tokenizer = replace(tokenizer, template=None)
    if source is not None:
        tokenizer = replace(tokenizer, template=ChatTemplate(source, {}))
    heads = MedusaHeads(MedusaConfig(8, VOCABULARY, num_heads=3))
    medusa = MedusaDrafter(heads, 8, VOCABULARY)
    model = TextModel(
        "toy",
        tokenizer,
        VOCABULARY,
        (END,),
        context,
        1234,
        torch.device("cpu"),
        {"none": NoDrafter(), "ngram": NoDrafter(), "medusa": medusa},
    )
    return Service(ScriptedEngine(script, tokenizer, context), model.device, text=model)
