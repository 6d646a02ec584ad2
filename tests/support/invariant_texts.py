"""A model whose results differ between one row and several, and requests for it."""

import torch

from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.packing import pack_weights
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.text_engines import prompts

SIZES = EngineConfig(page_size=4, kv_bytes=2**22, invariant=True, load_aware=False)


def long_sums(dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Returns a model whose last products have 2,080 columns, where one row differs from two."""
    torch.manual_seed(0)
    decoder = DecoderConfig(32, 2, 4, 2, 8, 2080, max_positions=64)
    model = LanguageModel(LanguageModelConfig(decoder, 40)).requires_grad_(False).eval()
    model.tokens.weight.mul_(30)
    return model.to(dtype)


def packed(model: LanguageModel) -> LanguageModel:
    """Packs the weights of the model and returns it."""
    pack_weights(model)
    return model


def report(engine: Engine, requests: list[TextQuery]) -> list[tuple[list[int], list[float]]]:
    """Returns the tokens and every bit of their log-probabilities."""
    answers = engine.run_many(requests)
    return [(a.tokens.tolist(), [r.top_values for r in a.logprobs]) for a in answers]


def text_queries(drafter: str = "none", **fields) -> list[TextQuery]:
    """Returns sampled requests with these parameters."""
    return [
        TextQuery(
            prompt,
            SamplingParams(temperature=0.8, seed=seed, max_tokens=14, logprobs=5, **fields),
            Speculation(drafter),
        )
        for seed, prompt in enumerate(prompts(8, seed=2, low=3, high=25))
    ]
