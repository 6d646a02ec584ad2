"""A model that is no `Recommender` is served: `SemanticIdModel` and `PrefixTemplate` suffice.

It has one layer with learned positions and a head over products of states. Its prefixes have a
token of the user, a separator before each item and a token at the end. Its levels do not follow one
another in the table of tokens.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recserve.core.request import LikelihoodQuery, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.trie.trie import build_trie
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig
from recserve.models.scoring import Scoring
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.service.prefixes import RecommenderPrefixBuilder
from recserve.service.snapshot import Snapshot

SIZES, OFFSETS, VOCABULARY = (5, 4, 6), (20, 9, 30), 40
NOBODY, USERS, SEPARATOR, END = 0, 6, 7, 8
LONGEST = 6


@dataclass(frozen=True)
class Config:
    """The smallest configuration of a model."""

    normalization: str
    scoring: Scoring
    decoder: DecoderConfig = DecoderConfig(16, 1, 2, 1, 8, 16, max_positions=64)
    codebook_sizes: tuple[int, ...] = SIZES
    level_offsets: tuple[int, ...] = OFFSETS
    num_token_levels: int = len(SIZES)
    num_end_levels: int = 0
    ended_code: int | None = None
    scores_vocabulary: bool = True
    autoregressive: bool = True
    dense_head: bool = False
    level_heads: bool = False


class Template:
    """user (separator code code code)* end"""

    max_items, first_item, grows, block = LONGEST, None, False, LONGEST // 4

    def tokens(self, rows, codes, user=None):
        who = NOBODY if user is None else 1 + len(user) % USERS
        items = np.asarray(codes)[rows] + np.array(OFFSETS)
        marks = np.full((len(rows), 1), SEPARATOR)
        return np.array([who, *np.concatenate([marks, items], 1).ravel(), END], np.int64)


class Layers(nn.Module):
    """One layer of attention with learned positions, and no norm."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, width = sizes, sizes.hidden_size
        self.positions = nn.Embedding(sizes.max_positions, width)
        self.qkv = nn.Linear(width, (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim)
        self.out = nn.Linear(sizes.num_heads * sizes.head_dim, width)

    def forward(self, x, positions, attend, rows=None, taps=None, gate=None):
        sizes = self.sizes
        x = x + self.positions(positions)
        heads = self.qkv(x).unflatten(-1, (-1, sizes.head_dim))
        counts = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
        query, key, value = (part.contiguous() for part in torch.split(heads, counts, dim=-2))
        x = x + self.out(attend(0, query, key, value).flatten(-2))
        return x if rows is None else x.index_select(-2, rows)


class Model(nn.Module):
    """Implements the protocol, and nothing beyond it."""

    items = search = None

    def __init__(self, normalization):
        super().__init__()
        self.config, self.template = Config(normalization, Scoring(normalization)), Template()
        self.decoder = Layers(self.config.decoder)
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.inner = nn.Linear(16, 16)

    def pack_search(self):
        pass

    def embed(self, tokens):
        return 2 * self.tokens(tokens)

    def bind_placeholders(self, vectors):
        raise NotImplementedError

    def full_logits(self, hidden):
        return F.gelu(self.inner(hidden)) @ self.tokens.weight.T

    def level_logits(self, hidden, level):
        return self.full_logits(hidden)[:, OFFSETS[level] : OFFSETS[level] + SIZES[level]]


def plain_beams(model, prefix, codes, width):
    """Returns rows and log-probabilities of beam search, one sequence at a time."""
    beams = [((), 0.0)]
    for level, offset in enumerate(OFFSETS):
        longer = []
        for path, score in beams:
            below = [at + code for at, code in zip(OFFSETS, path, strict=False)]
            tokens = torch.tensor([*prefix, *below])
            places = torch.arange(len(tokens))
            hidden = model.decoder(model.embed(tokens), places, DenseAttention())[-1:]
            logits = model.full_logits(hidden)[0]
            valid = sorted({int(c[level]) for c in codes if tuple(c[:level]) == path})
            own = logits[[offset + code for code in valid]]
            whole = own if model.config.normalization == "children" else logits
            gains = (own - whole.logsumexp(0)).tolist()
            longer += [
                ((*path, code), score + gain) for code, gain in zip(valid, gains, strict=True)
            ]
        beams = sorted(longer, key=lambda beam: -beam[1])[:width]
    rows = {tuple(each): row for row, each in enumerate(codes.tolist())}
    return [rows[path] for path, _ in beams], [score for _, score in beams]


@pytest.mark.parametrize("normalization", ["children", "vocabulary"])
@torch.inference_mode()
def test_another_model_is_served_through_the_protocol(normalization):
    torch.manual_seed(3)
    model: SemanticIdModel = Model(normalization).eval()
    every = torch.cartesian_prod(*map(torch.arange, SIZES))
    codes = every[torch.randperm(len(every))[:60]]
    trie = build_trie(codes, SIZES)
    engine = build_engine(EngineModels(model), EngineConfig(kv_bytes=2**20))
    assert engine.selectable == ("beam",)
    builder = RecommenderPrefixBuilder(model, torch.device("cpu"))
    snapshot: Snapshot = SimpleNamespace(items=SimpleNamespace(codes=codes.numpy()))
    draw = np.random.default_rng(5)
    history = draw.integers(0, len(codes), 2 * LONGEST)
    users = {None: history[:3], "ann": history, "ruth": history[:LONGEST]}
    prefixes = [builder.build(snapshot, rows, user) for user, rows in users.items()]
    assert len({int(prefix.keys[0]) for prefix in prefixes}) == 3
    for prefix in prefixes:
        assert prefix.keys[-1] == END and len(prefix.keys) <= 2 + LONGEST * 4
    width, rows = 8, np.arange(len(codes))
    for state in ("cold", "cached"):
        slates = engine.run_many(
            [SlateQuery(prefix=p, trie=trie, k=width, beam_width=width) for p in prefixes]
        )
        scores = engine.run_many([LikelihoodQuery(p, trie, rows) for p in prefixes])
        for prefix, slate, likely in zip(prefixes, slates, scores, strict=True):
            expected, log_probs = plain_beams(model, prefix.keys, codes, width)
            assert slate.rows.tolist() == expected, state
            np.testing.assert_allclose(slate.scores, log_probs, rtol=0, atol=1e-4)
            order, log_probs = plain_beams(model, prefix.keys, codes, len(codes))
            np.testing.assert_allclose(likely.values[order, 0], log_probs, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_a_history_that_changes_leaves_no_prefix_with_another_end():
    """The end of a prefix is not in the next one, so the pages of each one are dropped."""
    model: SemanticIdModel = Model("children").eval()
    codes = torch.cartesian_prod(*map(torch.arange, SIZES))
    trie, builder = build_trie(codes, SIZES), RecommenderPrefixBuilder(model, torch.device("cpu"))
    snapshot: Snapshot = SimpleNamespace(items=SimpleNamespace(codes=codes.numpy()))
    history = np.random.default_rng(5).integers(0, len(codes), LONGEST)

    def engine_after(count):
        engine = build_engine(EngineModels(model), EngineConfig(kv_bytes=2**20, page_size=1))
        for size in range(1, count + 1):
            prefix = builder.build(snapshot, history[:size], "ann")
            engine.run(SlateQuery(prefix=prefix, trie=trie, k=2, beam_width=2))
        return engine

    engine = engine_after(LONGEST)
    engine.forget(*builder.stale_keys(snapshot, history, history[:2], "ann"))
    assert engine.stats().pages_cached == engine_after(2).stats().pages_cached > 0
