"""Constrained texts over free ones, here and with llama.cpp's grammar on the same weights.

    python -m benchmarks.text.constrained_beside_llama_cpp LLM_FOLDER

Both write greedy texts of one prompt at a time with one thread, under the same rules for compact
JSON. A figure is tokens per second of constrained texts over that of free texts of the same
lengths, by the time of the process and by the clock: the best of the runs, which take turns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.baselines.llama_cpp import LlamaCpp, missing, write_gguf
from benchmarks.text.constrained import GRAMMARS
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.loading import load_language_model
from recserve.service.text.loader import TextSettings, load_text
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation

TEXTS, RUNS, TOKENS = 8, 5, 200
# The same texts as those of GRAMMARS.
WORD, NUMBER = "[a-z]{1,12}", '("0" | [1-9] [0-9]{0,N})'
GBNF = {
    "long keys": r'root ::= "{\"customer_identifier\":" '
    + NUMBER.replace("N", "2")
    + r' ",\"preferred_delivery_address\":\"" '
    + WORD
    + r' "\",\"is_subscribed_to_newsletter\":" ("true" | "false") ",\"membership_level\":\"" '
    + r'("standard" | "premium" | "enterprise") "\"}"',
    "short keys": rf'root ::= "{{\"a\":\"" {WORD} "\",\"b\":\"" {WORD} "\",\"c\":" '
    + NUMBER.replace("N", "3")
    + ' "}"',
    "free strings": r'root ::= "{\"text\":\"" char{60,80} "\"}"'
    + "\n"
    + r'char ::= [^"\\\x7F\x00-\x1F] | "\\" ["\\bfnrt]',
    "regex": 'root ::= ([a-z]{3,9} " "){8}',
}


def main() -> int:
    """Prints a table."""
    if absent := missing():
        print(f"not installed: {', '.join(absent)}")
        return 1
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    loaded = load_text(TextSettings(folder), torch.device("cpu"))
    models = EngineModels(text=loaded.network, drafters=loaded.drafters)
    engine = build_engine(models, EngineConfig(load_aware=False))
    network = load_language_model(folder)
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / "model.gguf"
        write_gguf(network, file, folder)
        theirs = LlamaCpp(file, loaded.model.context, 1, network.tokens.weight.dtype)
    prompts = [loaded.model.tokenizer.encode(f"Once upon a time, {n}") for n in range(TEXTS)]
    ends = loaded.model.end_tokens

    def ours(lengths: list[int] | None, name: str) -> list[int]:
        constraint = loaded.model.constrain("grammar", GRAMMARS[name])
        written = []
        for place, prompt in enumerate(prompts):
            query = TextQuery(
                np.array(prompt),
                SamplingParams(temperature=0, max_tokens=TOKENS, stop_token_ids=ends),
                Speculation(),
                constraint=constraint,
            )
            if lengths is not None:
                free = replace(query.params, max_tokens=lengths[place], stop_token_ids=())
                query = replace(query, params=free, constraint=None)
            (found,) = engine.run_many([query])
            written.append(len(found.tokens))  # type: ignore[union-attr]
        return written

    def other(lengths: list[int] | None, name: str) -> list[int]:
        if lengths is not None:
            return [
                len(theirs.write(prompt, most, time.perf_counter)[0])
                for prompt, most in zip(prompts, lengths, strict=True)
            ]
        return [len(theirs.write_under(prompt, TOKENS, GBNF[name])) for prompt in prompts]

    print("grammar       system      tokens  process  clock   tokens/s of a processor")
    for name in GRAMMARS:
        for system, write in (("recserve", ours), ("llama.cpp", other)):
            lengths = write(None, name)
            held, free = best(lambda: write(None, name)), best(lambda: write(lengths, name))  # noqa: B023
            print(
                f"{name:13} {system:10} {sum(lengths):7} {free[0] / held[0]:8.2f} "
                f"{free[1] / held[1]:6.2f} {sum(lengths) / held[0]:10.0f}",
                flush=True,
            )
    theirs.close()
    return 0


def best(call: Callable[[], Any]) -> tuple[float, float]:
    """Returns the least time of the process and of the clock of some runs."""
    times = []
    for _ in range(RUNS):
        began, clock = time.process_time(), time.perf_counter()
        call()
        times.append((time.process_time() - began, time.perf_counter() - clock))
    return min(one for one, _ in times), min(one for _, one in times)


if __name__ == "__main__":
    sys.exit(main())
