"""A recommender with a dense retriever, its vector index and an engine."""

import torch

from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.features.vectors.vector_index import FaissIndex
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig, item_vectors
from recserve.search.strategy import Heads
from tests.support.recommenders import draw_prefix, make

ORDINARY = torch.unique(torch.randint(0, 6, (150, 4), generator=torch.manual_seed(1)), dim=0)


SMALL = EngineConfig(kv_bytes=4 * 2**20)


class World:
    """A recommender, a retriever with two outcomes and three offsets, an index and an engine."""

    def __init__(self, form="items", codes=ORDINARY):
        self.model, self.trie = make(codes, form, "children")
        config = RetrieverConfig(
            32, 24, ("click", "repin"), (0.7, 0.3), "events", (1, 2, 4), (0.5, 0.25, 0.25)
        )
        torch.manual_seed(3)
        self.retriever = DenseRetriever(config)
        self.retriever.start_from(self.model)
        for name, weight in self.retriever.named_parameters():
            if name != "scale":
                weight.data.add_(torch.randn_like(weight), alpha=0.3)
        self.retriever.outcomes.weight.data.mul_(20)
        self.vectors = item_vectors(self.retriever.eval(), self.model).numpy()
        self.index = FaissIndex(self.vectors)
        self.engine = build_engine(
            EngineModels(self.model, heads=Heads(retriever=self.retriever)), SMALL
        )

    def request(self, seed, k=10, **fields):
        """Returns a `dense` request with a random history."""
        prefix = draw_prefix(self.model, 1 + seed % 9, seed)
        return SlateQuery(
            prefix=prefix,
            trie=self.trie,
            k=k,
            beam_width=k,
            strategy="dense",
            index=self.index,
            **fields,
        )
