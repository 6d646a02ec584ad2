"""Texts under the schemas of real programs: equal with and without drafts, and valid.

    python -m benchmarks.text.constrained_schemas FOLDER [TEXTS]

FOLDER has `maskbench-600.jsonl.gz`. A drawn model of bytes writes TEXTS texts (3,000) under the
schemas that constraints accept, with drafters that need no weights, a draft model and drawn weights
of each trained kind, at temperatures 0, .7 and 1.3, with penalties, truncation, logprobs and
min_tokens. A bias makes it close strings and leave lists, which drawn models seldom do. A small
cache preempts texts. jsonschema-rs judges every text that ends by itself, with formats.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import torch

from recserve.core.constraint import Constraint, Grammar
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.schemas.items import InvalidRequest
from recserve.service.text.loader import LoadedText, TextSettings, load_text
from recserve.speculation.completion import Completion, TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.scripted_text import END
from tests.support.text_engines import MAKERS
from tests.support.tiny_llm import tiny_llm

DRAFTERS = ("none", "ngram", "suffix", "lookahead", "draft_model", "ngram+draft_model")
TRAINED = ("eagle", "eagle3", "mtp", "peagle", "block", "block-dspark", "specformer", "mask_tokens")
BATCH, KV_BYTES = 60, 8 << 20  # pages for about a fifth of a batch


def accepted(loaded: LoadedText, file: Path) -> list[tuple[dict[str, Any], Constraint]]:
    """Returns the accepted schemas of a file with their constraints."""
    found = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            schema = json.loads(line)["schema"]
            try:
                wanted = Grammar("json_schema", json.dumps(schema))
                found.append((schema, loaded.model.constrain("schema", wanted)))
            except InvalidRequest:
                continue
    return found


def results(engine: Engine, queries: list[TextQuery]) -> list[Completion | BaseException]:
    """Returns the completion or the error of each request."""
    futures = [engine.submit(query) for query in queries]
    while engine.step():
        pass
    return [future.exception(0) or future.result(0) for future in futures]


def outcome(result: Completion | BaseException) -> object:
    """Returns what a text may not differ in."""
    if isinstance(result, BaseException):
        return repr(result)
    return result.tokens.tolist(), result.finish_reason


def main() -> None:
    """Prints counts, and every difference."""
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 3000
    with tempfile.TemporaryDirectory() as folder:
        llm = tiny_llm(Path(folder) / "llm")
        named = ("ngram", "suffix", f"draft_model={llm}", f"ngram+draft_model={llm}")
        loaded = load_text(TextSettings(llm, drafters=named), torch.device("cpu"))
    made = {name: MAKERS[name](loaded.network) for name in TRAINED}
    models = EngineModels(text=loaded.network, drafters=dict(loaded.drafters) | made)
    config = EngineConfig(load_aware=False, max_queue=BATCH)
    plain = build_engine(models, config)
    engine = build_engine(models, replace(config, kv_bytes=KV_BYTES))
    schemas = accepted(loaded, Path(sys.argv[1]) / "maskbench-600.jsonl.gz")
    closing = {loaded.model.tokenizer.encode_literal(c)[0]: 4.0 for c in '"]},'}
    random, counts = np.random.default_rng(0), Counter[str]()
    while counts["texts"] < most:
        own = [schemas[n] for n in random.integers(len(schemas), size=BATCH)]
        queries = [
            TextQuery(
                random.integers(0, 256, 8),
                SamplingParams(
                    temperature=float(random.choice([0.0, 0.7, 1.3])),
                    seed=int(random.integers(2**40)),
                    max_tokens=400,
                    stop_token_ids=(END,),
                    logit_bias=closing,
                    presence_penalty=float(random.choice([0.0, 0.0, 0.3])),
                    repetition_penalty=float(random.choice([1.0, 1.0, 1.1])),
                    top_p=float(random.choice([1.0, 0.9])),
                    min_tokens=int(random.choice([0, 2])),
                    logprobs=[None, 2][int(random.integers(2))],
                ),
                Speculation(str(random.choice([*DRAFTERS, *TRAINED]))),
                constraint=constraint,
            )
            for _, constraint in own
        ]
        bare = Speculation("none", num_tokens=0)
        wanted = results(plain, [replace(query, speculation=bare) for query in queries])
        found = results(engine, queries)
        for (schema, _), query, one, other in zip(own, queries, found, wanted, strict=True):
            counts["texts"] += 1
            if outcome(one) != outcome(other):
                counts["different"] += 1
                print("DIFFERENT", query.speculation.drafter, outcome(one), outcome(other))
            if isinstance(one, BaseException):
                counts["errors"] += 1
                print("error", one, json.dumps(schema)[:200])
                continue
            counts["preempted"] += one.timing.preemptions > 0
            counts["steps"] += one.timing.forwards
            counts["tokens"] += len(one.tokens)
            if one.finish_reason == "stop":
                counts["ended"] += 1
                text = loaded.model.tokenizer.decode(one.tokens.tolist())
                judge = jsonschema_rs.validator_for(schema, validate_formats=True)
                if not judge.is_valid(json.loads(text)):
                    counts["invalid"] += 1
                    print("INVALID", json.dumps(schema)[:400], text[:400])
    print(dict(counts))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
