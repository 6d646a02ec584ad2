"""The item graph against comparing all pairs, and the search against scoring all items."""

import numpy as np
import pytest
import torch

from recserve.features.vectors import item_graph
from recserve.features.vectors.item_graph import ItemLinks, link_items
from recserve.kernels.item_graph import NOTHING, GraphWalk, ItemGraph, best_of_all, rows_of, search


def catalogue(items, sizes=(9, 9, 9, 9), dim=5, seed=0):
    """Codes [I, L] with repeats of whole rows, and code embeddings."""
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.integers(0, c, items) for c in sizes], 1).astype(np.uint16)
    books = [rng.normal(size=(c, dim)).astype(np.float32) * 3 for c in sizes]
    return codes, books


def similarities(codes, books):
    """[I, I] mean cosine over levels, pair by pair."""
    out = np.zeros((len(codes), len(codes)))
    for i, a in enumerate(codes):
        for j, b in enumerate(codes):
            pairs = [(book[x], book[y]) for book, x, y in zip(books, a, b, strict=True)]
            cosines = [p @ q / np.linalg.norm(p) / np.linalg.norm(q) for p, q in pairs]
            out[i, j] = np.mean(cosines)
    return out


@pytest.mark.parametrize("items,edges", [(2, 5), (63, 7), (150, 20)])
def test_neighbours_are_the_most_similar_items(items, edges):
    codes, books = catalogue(items)
    links = link_items(codes, books, edges)
    assert links.neighbours.shape == (items, min(edges, items - 1))
    exact = similarities(codes, books)
    np.fill_diagonal(exact, -np.inf)
    best = -np.sort(-exact, axis=1)[:, : links.neighbours.shape[1]]
    found = np.take_along_axis(exact, links.neighbours.astype(np.int64), axis=1)
    np.testing.assert_allclose(found, best, atol=1e-5)
    assert links.entries.size and len(np.unique(links.entries)) == links.entries.size


def test_an_item_that_does_not_find_itself_loses_its_last_neighbour():
    """The longest of five parallel vectors have the largest inner products with each of them."""
    vectors = np.ones((5, 2), np.float32) * np.arange(5, 0, -1, dtype=np.float32)[:, None]
    found = item_graph._search(vectors, 2, seed=0)
    assert found.tolist() == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]


def test_short_vectors_and_an_inverted_file_miss_little(monkeypatch):
    """Wide code embeddings cut to an eighth, and an index that reads a part of its lists."""
    codes, books = catalogue(2000, sizes=(16,) * 8, dim=64)
    monkeypatch.setattr(item_graph, "SHORT_DIM", 96)
    monkeypatch.setattr(item_graph, "EXACT_ITEMS", 100)
    links = link_items(codes, books, 10)
    total = np.zeros((2000, 2000), dtype=np.float32)
    for level, book in enumerate(books):
        unit = book / np.linalg.norm(book, axis=1, keepdims=True)
        total += (unit @ unit.T)[codes[:, level][:, None], codes[:, level]]
    np.fill_diagonal(total, -np.inf)
    best = np.argsort(-total, axis=1)[:, :10]
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(best, links.neighbours, strict=True)]
    assert np.mean(shared) > 0.6
    assert (links.neighbours != np.arange(2000)[:, None]).all()


def test_one_item_has_no_neighbour():
    codes, books = catalogue(1)
    links = link_items(codes, books)
    assert links.neighbours.tolist() == [[-1]] and links.entries.tolist() == [0]


def test_saved_links_are_read_back_and_damage_is_named(tmp_path):
    links = link_items(*catalogue(40), 3)
    path = tmp_path / "graph.safetensors"
    links.save(path)
    again = ItemLinks.load(path)
    np.testing.assert_array_equal(again.neighbours, links.neighbours)
    np.testing.assert_array_equal(again.entries, links.entries)
    with pytest.raises(ValueError, match=r"neighbours span 0\.\.9; the graph has 2 items"):
        ItemLinks(np.array([[0], [9]], dtype=np.int32), np.array([0], dtype=np.int32))


def test_parts_that_do_not_fit_are_refused():
    codes, books = catalogue(5)
    with pytest.raises(ValueError, match=r"expected \[items, 3\]"):
        link_items(codes, books[:3])
    with pytest.raises(ValueError, match="edges is 0"):
        link_items(codes, books, 0)


def scored(items, batch, seed=0):
    """A complete graph, log-probabilities and tokens of drawn codes."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 9, (items, 4), generator=g) + 1 + 9 * torch.arange(4)
    near = torch.arange(items).expand(items, -1).to(torch.int32).contiguous()
    graph = ItemGraph(near, torch.zeros(1, dtype=torch.int32))
    return graph, torch.randn(batch, 37, generator=g), tokens


def no_seeds(batch):
    return torch.full((batch, 1), -1)


@pytest.mark.parametrize("items,batch,k", [(1, 1, 1), (1, 2, 4), (63, 3, 10), (300, 8, 400)])
@pytest.mark.parametrize("filtered", [False, True], ids=["all", "filtered"])
def test_a_complete_graph_finds_what_exhaustive_scoring_finds(items, batch, k, filtered):
    graph, log_probs, tokens = scored(items, batch)
    usable = None
    if filtered:
        usable = torch.rand(batch, items, generator=torch.manual_seed(2)) < 0.5
    found = search(graph, log_probs, tokens, no_seeds(batch), usable, GraphWalk(k, 4, 2))
    assert torch.equal(found.best, best_of_all(log_probs, tokens, usable, k))
    assert found.num_scored.tolist() == [items] * batch


def sparse(items, edges, batch, seed=0):
    graph, log_probs, tokens = scored(items, batch, seed)
    g = torch.Generator().manual_seed(seed + 1)
    near = torch.randint(-1, items, (items, edges), generator=g).to(torch.int32)
    return ItemGraph(near, torch.tensor([0, items // 2], dtype=torch.int32)), log_probs, tokens


def plain_search(graph, log_probs, tokens, seeds, usable, k, width, steps):
    """The same walk in Python sets. Returns rows, best first, and the number of scored items."""
    scores = {}

    def add(rows):
        for row in rows:
            scores.setdefault(row, float(log_probs[tokens[row]].mean()))

    add([r for r in seeds if r >= 0] + graph.entries.tolist())
    add(range(graph.num_items, len(tokens)))
    for step in range(steps):
        followed = max(width // 2 ** (steps - 1 - step), 1)
        best = sorted(scores, key=lambda r: (-scores[r], r))[:followed]
        known = [r for r in best if r < graph.num_items]
        add({n for r in known for n in graph.neighbours[r].tolist() if n >= 0})
    return sorted((r for r in scores if usable[r]), key=lambda r: (-scores[r], r))[:k], len(scores)


@pytest.mark.parametrize("late", [0, 3], ids=["all-linked", "late-items"])
def test_the_walk_is_that_of_a_plain_loop_alone_or_in_a_batch(late):
    """Repeats among neighbours and seeds, absent edges, items that the graph does not know."""
    graph, log_probs, tokens = sparse(200, 6, 5)
    tokens = torch.cat([tokens, tokens[:late] + 0])
    usable = torch.rand(5, 200 + late, generator=torch.manual_seed(3)) < 0.7
    seeds = torch.tensor([[7, 7, -1], [-1, -1, -1], [3, 0, 199], [5, 6, 7], [100, -1, 2]])
    found = search(graph, log_probs, tokens, seeds, usable, GraphWalk(12, 5, 3))
    for b in range(5):
        rows, count = plain_search(
            graph, log_probs[b], tokens, seeds[b].tolist(), usable[b], 12, 5, 3
        )
        best = found.best[b][found.best[b] != NOTHING]
        assert rows_of(best).tolist() == rows and int(found.num_scored[b]) == count
        one = slice(b, b + 1)
        alone = search(graph, log_probs[one], tokens, seeds[one], usable[one], GraphWalk(12, 5, 3))
        assert torch.equal(alone.best, found.best[one])
