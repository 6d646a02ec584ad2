"""Items by the tables of their levels, against a plain loop."""

import numpy as np
import pytest
import torch

from recserve.kernels import item_graph
from recserve.kernels.item_graph import (
    NOTHING,
    best_of_all,
    keys_of,
    rows_of,
    score_rows,
    scores_of,
)

SIZES = (4, 7, 3)
OFFSETS = torch.tensor([1, 5, 12])


def draw(items, batch, seed=0):
    """Log-probabilities [B, V] and item tokens [I, L]; equal tokens are likely."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randint(0, c, (items,), generator=g) for c in SIZES], 1) + OFFSETS
    return torch.randn(batch, 15, generator=g), tokens


def plain_order(log_probs, tokens, usable, k):
    """Rows by mean of their tokens' numbers, lower rows first among equals, by a Python loop."""
    scored = [
        (-sum(float(log_probs[t]) for t in row) / len(row), i)
        for i, row in enumerate(tokens.tolist())
        if usable[i]
    ]
    return [
        (i, -score) for score, i in sorted(scored, key=lambda pair: (round(pair[0], 5), pair[1]))
    ][:k]


def test_keys_keep_score_and_row_and_order_by_both():
    scores = torch.tensor([-1.5, 0.0, 3.25, -torch.inf, -1e-30, 3.25])
    rows = torch.tensor([5, 1, 2**32 - 1, 7, 0, 3])
    keys = keys_of(scores, rows)
    assert torch.equal(rows_of(keys), rows) and torch.equal(scores_of(keys), scores)
    assert keys.argsort(descending=True).tolist() == [5, 2, 1, 4, 0, 3]
    assert (keys > NOTHING).all()


@pytest.mark.parametrize("chunk", [5, 65_536])
@pytest.mark.parametrize("items,batch,k", [(1, 1, 3), (63, 3, 10), (781, 9, 40)])
def test_best_of_all_matches_a_plain_loop(monkeypatch, items, batch, k, chunk):
    monkeypatch.setattr(item_graph, "CHUNK", chunk)
    log_probs, tokens = draw(items, batch)
    usable = torch.rand(batch, items, generator=torch.manual_seed(1)) < 0.6
    for mask in (None, usable):
        best = best_of_all(log_probs, tokens, mask, k)
        assert best.shape == (batch, k)
        for b in range(batch):
            expected = plain_order(
                log_probs[b], tokens, usable[b] if mask is not None else [1] * items, k
            )
            found = best[b][best[b] != NOTHING]
            assert len(found) == len(expected)
            assert rows_of(found).tolist() == [row for row, _ in expected]
            np.testing.assert_allclose(scores_of(found), [s for _, s in expected], atol=1e-6)


def test_some_rows_score_as_all_do():
    log_probs, tokens = draw(63, 2)
    owners, rows = torch.tensor([0, 1, 1]), torch.tensor([62, 0, 62])
    expected = torch.stack(
        [log_probs[b, tokens[i]].mean() for b, i in zip(owners, rows, strict=True)]
    )
    torch.testing.assert_close(score_rows(log_probs, tokens, owners, rows), expected)
