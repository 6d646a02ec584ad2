"""Prefixes of every length are computed as by a plain forward, whichever attention takes them."""

import pytest
import torch

from recserve.core.request import Prefix, PrefixKeys, PrewarmQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender


def cached(engine, prefix):
    """Returns what is cached with a whole prefix."""
    return engine.schedulers["recommender"].kv.prefixes.match(PrefixKeys(prefix.keys))[2]


@pytest.mark.parametrize("heads,kv_heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("length", [1, 120, 129, 200, 300])
def test_the_last_state_is_that_of_a_plain_forward(length, heads, kv_heads):
    torch.manual_seed(0)
    config = RecommenderConfig(DecoderConfig(64, 2, heads, kv_heads, 64, 128), (8, 8), "codes")
    model = Recommender(config).eval()
    model.bind_items(torch.cartesian_prod(torch.arange(8), torch.arange(8)))
    tokens = torch.randint(0, 17, (length,))
    with torch.no_grad():
        plain = model(tokens[None], torch.arange(length)[None], DenseAttention())[0, -1]
    engine = build_engine(EngineModels(model), EngineConfig(kv_bytes=16 * 2**20))
    prefix = Prefix(NodeInputs(tokens), tokens.numpy())
    engine.run(PrewarmQuery(prefix, "recommender"))
    tail = cached(engine, prefix).last_hidden
    torch.testing.assert_close(tail, plain, rtol=1e-4, atol=1e-4)
    if length > 1:  # the same behind a prefix that is cached
        longer = torch.cat([tokens, tokens])
        with torch.no_grad():
            plain = model(longer[None], torch.arange(2 * length)[None], DenseAttention())[0, -1]
        prefix = Prefix(NodeInputs(longer), longer.numpy())
        engine.run(PrewarmQuery(prefix, "recommender"))
        tail = cached(engine, prefix).last_hidden
        torch.testing.assert_close(tail, plain, rtol=1e-4, atol=1e-4)
