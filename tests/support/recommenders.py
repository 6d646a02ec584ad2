"""Small random recommenders, their catalogues, and histories as prefixes."""

from collections.abc import Sequence

import torch

from recserve.core.request import Prefix
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender

CATALOGUES = {
    "one-item": torch.tensor([[3, 0, 1]]),
    "one-prefix": torch.tensor([[1, 1, i] for i in range(9)]),
    "deep": torch.tensor([[i % 2] * 6 + [i] for i in range(7)]),
    "ordinary": torch.unique(torch.randint(0, 6, (150, 4), generator=torch.manual_seed(1)), dim=0),
}


FORMS = [("codes", "vocabulary"), ("codes", "children"), ("items", "children")]


def make(codes: torch.Tensor, form: str, normalization: str) -> tuple[Recommender, Trie]:
    """Returns a random recommender over these semantic ids, and its trie."""
    torch.manual_seed(0)
    sizes = tuple(int(c) + 1 for c in codes.max(0).values)
    decoder = DecoderConfig(32, 2, 4, 2, 8, 48)
    dense = form == "items"
    model = Recommender(
        RecommenderConfig(
            decoder, sizes, form, normalization, num_items=len(codes), dense_head=dense
        )
    )
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.mul_(8)
    model.bind_items(codes)
    return model.eval(), build_trie(codes, sizes)


def prefix_of(model: Recommender, history: Sequence[int]) -> Prefix:
    """Returns BOS and the items of these rows, in the model's input form."""
    rows = torch.tensor(history, dtype=torch.long)
    if model.config.input == "items":
        tokens = model.config.num_code_tokens + rows
    else:
        tokens = model.item_tokens[rows].flatten()
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), tokens])
    return Prefix(NodeInputs(tokens), tokens.numpy())


def draw_prefix(model: Recommender, events: int, seed: int) -> Prefix:
    """Returns a random history of `events` items."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, model.num_bound_items, (events,), generator=g)
    return prefix_of(model, rows.tolist())
