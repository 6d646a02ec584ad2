"""Tokens per second of constrained texts over free ones, with and without forced tokens.

    python -m benchmarks.text.constrained LLM_FOLDER

The time is that of the process, so that other programs on the machine count less. Free texts draw
as many tokens as the constrained ones of the same prompt, the end token included. Runs take turns.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recserve.core.constraint import Choices, Grammar
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.service.text.loader import TextSettings, load_text
from recserve.speculation.completion import Completion, TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation

TEXTS, RUNS = 16, 8


def an_object(**properties: Any) -> Grammar:
    """Returns a request for an object with these properties."""
    fields = {"type": "object", "properties": properties, "required": list(properties)}
    return Grammar("json_schema", json.dumps(fields | {"additionalProperties": False}))


SHORT = {"type": "string", "maxLength": 12, "pattern": "^[a-z]+$"}
GRAMMARS: dict[str, Grammar | Choices] = {
    "long keys": an_object(
        customer_identifier={"type": "integer", "minimum": 0, "maximum": 999},
        preferred_delivery_address=SHORT,
        is_subscribed_to_newsletter={"type": "boolean"},
        membership_level={"enum": ["standard", "premium", "enterprise"]},
    ),
    "short keys": an_object(a=SHORT, b=SHORT, c={"type": "integer", "maximum": 9999, "minimum": 0}),
    "free strings": an_object(text={"type": "string", "minLength": 60, "maxLength": 80}),
    "regex": Grammar("regex", "([a-z]{3,9} ){8}"),
}


def main() -> None:
    """Prints a table."""
    loaded = load_text(TextSettings(Path(sys.argv[1])), torch.device("cpu"))
    models = EngineModels(text=loaded.network, drafters=loaded.drafters)
    engine = build_engine(models, EngineConfig(load_aware=False))
    ends = loaded.model.end_tokens

    def run(queries: list[TextQuery]) -> tuple[float, list[Completion]]:
        """Returns the time of the texts, and the texts."""
        began = time.process_time()
        found = engine.run_many(list(queries))  # type: ignore[arg-type]
        return time.process_time() - began, found  # type: ignore[return-value]

    print("grammar        batch  tokens  steps/token  unforced/free  forced/free")
    for batch in (1, TEXTS):
        for name, wanted in GRAMMARS.items():
            constraint = loaded.model.constrain("grammar", wanted)
            queries = [
                TextQuery(
                    np.array(loaded.model.tokenizer.encode(f"Once upon a time, {n}")),
                    SamplingParams(temperature=0.8, seed=n, max_tokens=200, stop_token_ids=ends),
                    Speculation(num_tokens=0),
                    constraint=constraint,
                )
                for n in range(batch)
            ]
            forced = [replace(query, speculation=Speculation()) for query in queries]
            _, texts = run(queries)
            _, same = run(forced)
            assert [t.tokens.tolist() for t in texts] == [t.tokens.tolist() for t in same]
            free = [
                replace(
                    query,
                    constraint=None,
                    params=replace(
                        query.params,
                        stop_token_ids=(),
                        max_tokens=len(text.tokens) + (text.stop_token is not None),
                    ),
                )
                for query, text in zip(queries, texts, strict=True)
            ]
            kinds = (free, queries, forced)
            times = [[run(one)[0] for one in kinds] for _ in range(RUNS)]
            free_s, plain_s, forced_s = map(min, zip(*times, strict=True))
            tokens = sum(len(text.tokens) for text in texts)
            steps = sum(text.timing.forwards for text in same) / tokens
            print(
                f"{name:14} {batch:5} {tokens:7} {steps:12.2f} {free_s / plain_s:14.2f} "
                f"{free_s / forced_s:12.2f}"
            )


if __name__ == "__main__":
    main()
