"""Semantic ids of unusual shapes, and catalogues that change."""

import numpy as np
import torch

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.trie import build_trie
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.search.strategy import Heads


def draw_codes(items: int, sizes: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Returns `items` distinct random semantic ids."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.stack([torch.randint(0, s, (items * 3,), generator=g) for s in sizes], 1)
    codes = torch.unique(codes, dim=0)
    return codes[torch.randperm(codes.shape[0], generator=g)[:items]]


CATALOGUES = {
    "one-item": torch.tensor([[3, 0, 7]]),
    "all-share-a-prefix": torch.tensor([[1, 1, i] for i in range(9)]),
    "deep": torch.tensor([[i % 2] * 7 + [i] for i in range(6)]),
    "drawn": draw_codes(300, (8, 8, 8)),
    "sparse": draw_codes(200, (256, 256, 256, 4)),
}


SHAPES = {
    "narrow": ((3, 3, 3), 12, 9),
    "drawn": ((8, 8, 8, 3), 200, 90),
    "wide": ((256, 256, 4), 150, 60),
    "deep": ((2,) * 9, 60, 80),
    "one-item": ((4, 4), 1, 5),
    "nothing-new": ((5, 5, 2), 20, 0),
}


class Changed:
    """A base catalogue with later semantic ids inserted, and the same catalogue rebuilt.

    Some of the later ids also occur in the base, where they replace an item. Replaced rows are
    removed, and a quarter of the items is hidden.
    """

    def __init__(self, sizes, items, later, seed=0):
        draw = np.random.default_rng(seed)
        ids = np.unique(draw.integers(0, sizes, (20 * (items + later) + 50, len(sizes))), axis=0)
        ids = torch.from_numpy(draw.permutation(ids)[: items + later])
        self.base_codes, fresh = ids[:items], ids[items:]
        replaced = self.base_codes[: items // 5] if later else self.base_codes[:0]
        codes = torch.cat([fresh, replaced])[draw.permutation(len(fresh) + len(replaced))]
        self.num_rows = items + len(codes) + 3  # three later rows were replaced again
        places = np.sort(draw.choice(len(codes) + 3, len(codes), replace=False))
        rows = items + torch.from_numpy(places)
        self.base = build_trie(self.base_codes, sizes)
        owners = {tuple(code): row for row, code in enumerate(self.base_codes.tolist())}
        owners |= dict(zip(map(tuple, codes.tolist()), rows.tolist(), strict=True))
        self.owners = owners
        superseded = sorted(set(range(self.num_rows)) - set(owners.values()))
        hidden = draw.permutation(sorted(owners.values()))[: len(owners) // 4].tolist()
        self.hidden = hidden
        gone = torch.tensor(sorted(superseded + hidden))
        # In two steps, like two versions: the second reuses most nodes of the first.
        most = rows[: 2 * len(rows) // 3]
        first = insert_items(self.base, codes[: len(most)], most, self.num_rows)
        self.trie = insert_items(self.base, codes, rows, self.num_rows, gone, first)
        every = torch.tensor(sorted(owners))
        self.rebuilt = build_trie(
            every, sizes, torch.tensor([owners[tuple(c)] for c in every.tolist()]), self.num_rows
        )
        # Node numbers of the changed trie, by node number of the rebuilt trie.
        self.rows = torch.tensor(sorted(owners.values()))
        self.node = torch.zeros(self.rebuilt.num_nodes, dtype=torch.int64)
        self.node[self.rebuilt.nodes_of_items(self.rows)] = self.trie.nodes_of_items(self.rows)


def engine_of(changed):
    """Returns a random model with a dense head and a self-draft head, over all rows ever used."""
    torch.manual_seed(0)
    sizes = changed.base.codebook_sizes
    decoder = DecoderConfig(32, 2, 4, 2, 8, 48)
    config = RecommenderConfig(decoder, sizes, num_items=changed.num_rows, dense_head=True)
    model = Recommender(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.mul_(8)
    codes = torch.zeros(changed.num_rows, len(sizes), dtype=torch.int64)
    for code, row in changed.owners.items():
        codes[row] = torch.tensor(code)
    model.bind_items(codes)
    head = SelfDraftHead(SelfDraftConfig(32, sizes)).eval()
    return model, build_engine(
        EngineModels(model, heads=Heads(head)), EngineConfig(kv_bytes=8 * 2**20)
    )
