"""Parameters, prompts, engines and reference texts for tests of the text engine."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.draft_model.specinfer import specinfer
from recserve.drafters.eagle.drafter import EagleDrafter
from recserve.drafters.eagle.network import Eagle, EagleConfig
from recserve.drafters.lookahead import LookaheadDrafter
from recserve.drafters.medusa.drafter import MedusaDrafter
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.drafters.merged import MergedDrafter
from recserve.drafters.ngram import NgramDrafter
from recserve.drafters.suffix.drafter import SuffixDrafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.models.decoder import FINAL_LAYER, RMSNorm
from recserve.models.language_model import LanguageModel
from recserve.speculation.completion import TextQuery
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.block_drafter import block
from tests.support.mask_tokens_drafter import mask_tokens
from tests.support.mtp_drafter import mtp, peagle
from tests.support.shared_folders import shared_folder
from tests.support.specformer_drafter import specformer
from tests.support.text_plain import VOCABULARY, drawn_model, plain

PARAMETERS = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.3},
    "top-k": {"top_k": 5, "temperature": 1.3},
    "top-p": {"top_p": 0.8, "temperature": 1.3},
    "min-p": {"min_p": 0.1, "temperature": 1.3},
    "all-truncations": {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.7, "temperature": 0.0},
    "presence": {"presence_penalty": 1.1, "temperature": 0.0},
    "frequency": {"frequency_penalty": 0.8, "temperature": 1.0},
    "bias": {"logit_bias": {3: 2.5, 7: -100.0}, "temperature": 0.9},
    "bad-words": {"bad_words": ((5,), (1, 2), (9, 4, 9)), "temperature": 1.3},
    "stops": {"stop_token_ids": (2, 11, 17), "temperature": 1.3, "max_tokens": 20},
    "min-tokens": {"stop_token_ids": tuple(range(20)), "min_tokens": 7, "temperature": 1.0},
    "everything": {
        "temperature": 1.2,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {0: 1.5},
        "bad_words": ((3, 3), (8,)),
        "stop_token_ids": (30,),
        "min_tokens": 6,
    },
}


# `among_others` of these has every set of parameters, and a text that each parameter changes.
SPREAD = ("top-k", "min-p", "frequency", "min-tokens", "everything")


def engine_for(model, pages: int = 200, drafters=None, page_size: int = 4, **config) -> Engine:
    """Returns an engine for a model with `pages` pages of `page_size` slots. It always drafts."""
    decoder = model.config.decoder
    shapes = [KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)]
    parts = [part for drafter in (drafters or {}).values() for part in drafter.parts]
    shapes += [part.kv_shape for part in parts if part.kv_shape is not None]
    slot = sum(shape.slot_bytes(torch.float32) for shape in shapes)
    config = {"load_aware": False} | config
    sizes = EngineConfig(page_size=page_size, kv_bytes=pages * page_size * slot, **config)
    return build_engine(EngineModels(text=model, drafters=drafters), sizes)


def add_drafter(engine: Engine, name: str, drafter: Drafter) -> None:
    """Adds a drafter to an engine that knows nothing of it, with the pools that it needs."""
    pool = engine.schedulers["text"].runner.pool
    for part in drafter.parts:
        if part.kv_shape is not None:
            size = pool.num_pages, pool.page_size, pool.keys.dtype, pool.keys.device
            own = KVPool(part.kv_shape, *size, part.scratch_slots)
            pool.attached.append(own)
            part.attach(own)
    engine.drafters[name] = drafter


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 20) -> list[np.ndarray]:
    """Returns random prompts with lengths from `low` to `high` - 1."""
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, random.integers(low, high)) for _ in range(count)]


def assert_no_leak(engine: Engine) -> None:
    """Asserts that every row is free, and every page free or held only by the prefix cache."""
    lane = engine.schedulers["text"]
    assert lane.num_running == 0
    allocator = lane.kv.allocator
    assert allocator.num_free + allocator.num_idle == allocator.num_pages
    assert lane.kv.prefixes.evict(allocator.num_pages)
    assert allocator.num_free == allocator.num_pages
    assert sorted(lane.kv._free_rows) == list(range(1, len(lane.kv.slots)))


def medusa(model) -> MedusaDrafter:
    """Returns a Medusa drafter with untrained heads."""
    torch.manual_seed(0)
    heads = MedusaHeads(MedusaConfig(model.config.decoder.hidden_size, VOCABULARY, 3))
    heads.start_from(model)
    return MedusaDrafter(heads.eval(), model.config.decoder.hidden_size, VOCABULARY)


def eagle(model, fused: bool, seed: int = 0, fields=None, **sizes) -> EagleDrafter:
    """Returns an EAGLE drafter with drawn weights: EAGLE-1's network, or EAGLE-3's if fused."""
    torch.manual_seed(seed)
    target, words = model.config.decoder, model.config.vocab_size
    config = EagleConfig(
        decoder=replace(target, num_layers=1),
        target_size=target.hidden_size,
        target_layers=(0, target.num_layers // 2, target.num_layers) if fused else (FINAL_LAYER,),
        vocab_size=words,
        draft_vocab_size=words // 2 if fused else words,
        fused=fused,
        fc_bias=not fused,
        **(fields or {}),
    )
    network = Eagle(config).requires_grad_(False).eval()
    for norm in (m for m in network.modules() if isinstance(m, RMSNorm)):
        norm.weight.add_(0.3 * torch.randn(norm.weight.shape))
    if network.token_map is not None:
        network.token_map.copy_(torch.arange(0, 2 * config.draft_vocab_size, 2))
    return EagleDrafter(network, model, **{"width": 3, "depth": 4, "num_nodes": 12} | sizes)


MAKERS = {  # every drafter, for a target
    "ngram": lambda m: NgramDrafter(min_match=1),
    "suffix": lambda m: SuffixDrafter(),
    "lookahead": lambda m: LookaheadDrafter(window=3, ngram=3),
    "draft_model": lambda m: ModelDrafter(m, VOCABULARY, (1,) * 4),
    "specinfer": lambda m: specinfer([m, drawn_model(3)], VOCABULARY, (2, 1, 2)),
    "medusa": medusa,
    "eagle": lambda m: eagle(m, fused=False),
    "eagle3": lambda m: eagle(m, fused=True),
    "mtp": mtp,
    "peagle": peagle,
    "block": lambda m: block(m, "dflash"),
    "block-dflash2": lambda m: block(m, "dflash2"),
    "block-dspark": lambda m: block(m, "dspark"),
    "specformer": specformer,
    "mask_tokens": mask_tokens,
    "mask_tokens_linear": lambda m: mask_tokens(m, quadratic=False),
    "merged": lambda m: MergedDrafter(
        [SuffixDrafter(), LookaheadDrafter(window=2, ngram=3), ModelDrafter(m, VOCABULARY)]
    ),
}


def assert_forgotten(drafter) -> None:
    """Asserts that the drafter holds no state of finished sequences."""
    for member in getattr(drafter, "sources", (drafter,)):
        for state in (
            "_texts",
            "_contexts",
            "_windows",
            "_parts",
            "_outputs",
            "_layouts",
            "_lengths",
        ):
            assert not getattr(member, state, {})


def undrafted(model, requests: Sequence[TextQuery]) -> list[list[int]]:
    """Returns the tokens of the requests without drafts, all together, with room for all."""
    plain_requests = [replace(request, speculation=Speculation()) for request in requests]
    answers = engine_for(model, 2000).run_many(plain_requests)
    return [answer.tokens.tolist() for answer in answers]


@cache
def shared_model() -> LanguageModel:
    """Returns one model for many tests, which must not change it."""
    return drawn_model(1)


@cache
def plain_texts() -> dict[tuple[str, int], tuple]:
    """Returns parameters, tokens, finish reason and stop token of plain decoding.

    The texts are 8 prompts under every set of parameters.
    """
    file = shared_folder("plain-texts", write_plain_texts) / "texts.json"
    texts = json.loads(file.read_text(encoding="utf-8"))
    return {
        (name, number): (text_params(name, number), *text)
        for name, written in texts.items()
        for number, text in enumerate(written)
    }


def text_params(name: str, number: int) -> SamplingParams:
    """Returns the parameters `name` for one of the prompts."""
    return SamplingParams(**{"max_tokens": 12, "seed": 100 + number} | PARAMETERS[name])


def write_plain_texts(folder: Path) -> None:
    """Writes what `plain` returns for every set of parameters and prompt."""
    texts = {
        name: [
            plain(shared_model(), prompt.tolist(), text_params(name, number))
            for number, prompt in enumerate(prompts(8))
        ]
        for name in PARAMETERS
    }
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")


def among_others(name: str, speculation: Speculation) -> tuple[list[TextQuery], list[list[int]]]:
    """Returns eight requests, half of them with parameters other than `name`, and their plain
    texts.
    """
    others, requests, wanted = list(PARAMETERS), [], []
    for number, prompt in enumerate(prompts(8)):
        other = others[(others.index(name) + number // 2) % len(others)]
        params, tokens, *_ = plain_texts()[name if number % 2 == 0 else other, number]
        requests.append(TextQuery(prompt, params, speculation))
        wanted.append(tokens)
    return requests, wanted


def texts_by_prompt(name: str) -> dict[tuple[int, ...], list[int]]:
    """Returns the plain texts under the parameters `name`, for a TableDrafter."""
    return {tuple(p.tolist()): plain_texts()[name, n][1] for n, p in enumerate(prompts(8))}
