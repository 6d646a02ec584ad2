"""How similar the items of a catalogue are: by vectors, by links, or by both.

    similar_vectors(q, i) = cosine of the item vectors of q and i
    similar_links(q, i)   = link(q, i): how often training users had i at most three events after q
    similar(q, i)         = similar_vectors(q, i) + weight * similar_links(q, i)

Several items q count with their mean. `recserve train similar` makes the links and chooses the
weight. Without it the weight is 0. All items are compared, so the order is exact.

The links are those of the history bonus (models/history_bonus.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from recserve.bundle.bundle import SIMILAR_ITEMS, Bundle
from recserve.core.diversity import Cap, first_k
from recserve.core.request import LoweredItems, Slate
from recserve.features.catalog.versions import SCAN_GROWTH, CatalogVersion
from recserve.models.history_bonus import HistoryBonus, load_history_bonus

BOTH, BY_VECTORS, BY_LINKS = SIMILARITIES = ("similar", "similar_vectors", "similar_links")
MAX_ITEMS = 64  # the latest items of a history that count
MAX_KNOWN = 8192  # vectors whose nearest items are remembered
NEAR = 50  # items around one with a negative event that are lowered, itself among them
NO_LINKS = "this bundle has no links between items; recserve train similar --bundle BUNDLE"


@dataclass(frozen=True)
class _Nearest:
    """Items around a vector.

    Attributes:
        rows: [n] int64 item rows, ascending.
        cosines: [n] float32 their cosines, above 0.
    """

    rows: np.ndarray
    cosines: np.ndarray


@dataclass(frozen=True, eq=False)
class ItemSimilarity:
    """Similarities of the items of a bundle and of its later versions.

    Attributes:
        vectors: [I, F] float32 item vectors of the bundle.
        scales: [I] float32, 1 / length of each vector; 0 for a vector of zeros.
        links: Links between the bundle's items; None without any.
        weight: Weight of the links.
        _known: The nearest items of vectors that were asked for lately.
    """

    vectors: np.ndarray
    scales: np.ndarray
    links: HistoryBonus | None = None
    weight: float = 0.0
    _known: OrderedDict[bytes, _Nearest] = field(
        default_factory=OrderedDict, init=False, repr=False
    )

    @staticmethod
    def of(
        vectors: np.ndarray, links: HistoryBonus | None = None, weight: float = 0.0
    ) -> ItemSimilarity:
        """Returns the similarities of items with these vectors."""
        return ItemSimilarity(vectors, _scales(vectors), links, weight)

    @staticmethod
    def open(bundle: Bundle, vectors: np.ndarray) -> ItemSimilarity:
        """Reads links and weight of a bundle. Raises ValueError if they are damaged."""
        if not bundle.has(SIMILAR_ITEMS):
            return ItemSimilarity.of(vectors)
        links = load_history_bonus(bundle.directory(SIMILAR_ITEMS), len(vectors))
        weight = float(bundle.manifest.sections[SIMILAR_ITEMS].get("weight", 0.0))
        return ItemSimilarity.of(vectors, links, weight)

    def scores(self, strategy: str, rows: np.ndarray, items: CatalogVersion) -> np.ndarray:
        """Returns [num_rows] float32 similarities to the latest MAX_ITEMS of some items.

        An item without a link has the similarity -inf under `similar_links`.

        Args:
            strategy: One of SIMILARITIES.
            rows: [n] item rows, n at least 1, oldest first. A repeated item counts once.
            items: The catalogue version.
        """
        rows = np.unique(rows[-MAX_ITEMS:])
        linked = np.zeros(items.num_rows, np.float32)
        if strategy != BY_VECTORS and self.links is not None:
            linked = self._mean_links(rows, items)
        if strategy == BY_LINKS:
            return np.where(linked > 0, linked, -np.inf).astype(np.float32)
        chosen = np.asarray(items.vectors[rows], np.float32)
        query = (chosen * _scales(chosen)[:, None]).mean(axis=0)
        tail = items.tail.vectors.view(items.num_tail)
        near = np.concatenate(
            [(self.vectors @ query) * self.scales, (tail @ query) * _scales(tail)]
        )
        if strategy == BOTH and self.weight:
            near += np.float32(self.weight) * linked
        return near

    def near_items(
        self, rows: np.ndarray, amounts: np.ndarray, items: CatalogVersion
    ) -> LoweredItems:
        """Returns the NEAR items around each of some items, and by how much they are lowered.

        That is the cosine of the vectors times the amount; of several, the largest. Items with
        equal cosines count as one.

        Args:
            rows: [d] item rows.
            amounts: [d] by how much an item with the same vector is lowered.
            items: The catalogue version.
        """
        chosen = np.asarray(items.vectors[rows], np.float32)
        chosen = chosen * _scales(chosen)[:, None]
        tail = items.tail.vectors.view(items.num_tail)
        new = (tail @ chosen.T) * _scales(tail)[:, None]
        new_rows = len(self.vectors) + np.arange(len(tail))
        all_rows, all_amounts = [], []
        for old, of_new, amount in zip(self._nearest(chosen), new.T, amounts.tolist(), strict=True):
            near = np.concatenate([old.cosines, of_new])
            close = _nearest_of(near)
            all_rows.append(np.concatenate([old.rows, new_rows])[close])
            all_amounts.append(np.float32(amount) * near[close])
        found, place = np.unique(np.concatenate(all_rows), return_inverse=True)
        lowered = np.zeros(len(found), np.float32)
        np.maximum.at(lowered, place, np.concatenate(all_amounts))
        return LoweredItems(found[lowered > 0], lowered[lowered > 0])

    def _nearest(self, chosen: np.ndarray) -> list[_Nearest]:
        """Returns the items of the bundle that are nearest to some unit vectors [d, F].

        All items are compared, once for each vector that was not asked for lately.
        """
        keys = [vector.tobytes() for vector in chosen]
        found = {key: self._known.get(key) for key in keys}
        missing = {key: place for place, key in enumerate(keys) if found[key] is None}
        if missing:
            cosines = (self.vectors @ chosen[[*missing.values()]].T).T * self.scales
            for key, near in zip(missing, cosines, strict=True):
                rows = np.flatnonzero(_nearest_of(near))
                found[key] = nearest = _Nearest(rows, near[rows])
                if len(rows) <= 2 * NEAR:  # more have equal cosines
                    if len(self._known) >= MAX_KNOWN:
                        self._known.popitem(last=False)
                    self._known[key] = nearest
        return [one for key in keys if (one := found[key]) is not None]

    def _mean_links(self, rows: np.ndarray, items: CatalogVersion) -> np.ndarray:
        """Returns [num_rows] float32 the mean of the links from items; later rows inherit them."""
        assert self.links is not None
        sums = np.zeros(len(self.vectors))
        for row in rows.tolist():
            trained = items.trained_row(row)
            if trained >= 0:
                place = slice(*self.links.offsets[trained : trained + 2].tolist())
                sums[self.links.rows[place]] += self.links.links[place]
        later = items.trained_rows
        tail = np.where(later >= 0, sums[np.maximum(later, 0)], 0.0)
        return (np.concatenate([sums, tail]) / len(rows)).astype(np.float32)


def best_items(scores: np.ndarray, allowed: np.ndarray, caps: Sequence[Cap], k: int) -> Slate:
    """Returns the k allowed items with the best scores under the caps, equals in row order.

    Args:
        scores: [num_rows] float32; -inf leaves an item out.
        allowed: [num_rows] bool.
        caps: The caps.
        k: Most items.
    """
    rows = np.flatnonzero(allowed & (scores > -np.inf))
    values = scores[rows]
    looked_at = k
    while True:
        head = np.arange(rows.size)
        if looked_at < rows.size:
            least = np.partition(values, rows.size - looked_at)[rows.size - looked_at]
            head = np.flatnonzero(values >= least)
        head = head[np.lexsort((rows[head], -values[head]))]
        chosen = head[first_k(rows[head], caps, k)]
        if chosen.size == k or head.size == rows.size:
            return Slate(rows[chosen], values[chosen], exact=True, rounds=0)
        looked_at *= SCAN_GROWTH


def _scales(vectors: np.ndarray) -> np.ndarray:
    """Returns [n] float32, 1 / length of each vector [n, F]; 0 for a vector of zeros."""
    lengths = np.linalg.norm(vectors, axis=1)
    return np.asarray(np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0))


def _nearest_of(cosines: np.ndarray) -> np.ndarray:
    """Returns [n] bool, True for the NEAR largest cosines above 0 and those equal to the least."""
    near = cosines > 0
    if cosines.size > NEAR:
        near &= cosines >= np.partition(cosines, cosines.size - NEAR)[cosines.size - NEAR]
    return near
