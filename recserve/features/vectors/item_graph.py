"""The item graph links every item to the items whose codes are most similar.

Similarity is the mean over levels of the cosine of the code embeddings. It equals the inner product
of the items' concatenated code embeddings, up to a constant factor. These vectors are too wide to
store for every item. They are projected on their principal axes, first per level, then over all
levels together. An index finds candidates by the short vectors, and the exact similarity orders
them.

Source: RPG, KDD 2025, section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
from safetensors.numpy import save_file

from recserve.files import read_arrays, whole_file

EDGES = 64
WIDE_DIM = 1024
SHORT_DIM = 256
SAMPLE = 16_384
EXACT_ITEMS = 32_768
PROBES = 32
MARGIN = 3
MAX_EXACT_CODES = 8_192
ENTRY_ROUNDS = 8
CHUNK = 8_192


@dataclass(frozen=True)
class ItemLinks:
    """Edges of the item graph.

    Attributes:
        neighbours: [I, edges] int32 most similar items, best first, padded with -1.
        entries: [S] int32 items that are spread over the whole catalogue, to start searches from.

    Raises:
        ValueError: If an array has another shape or type, or an item is out of range.
    """

    neighbours: np.ndarray
    entries: np.ndarray

    def __post_init__(self) -> None:
        near, entries = self.neighbours, self.entries
        if near.ndim != 2 or entries.ndim != 1 or not near.size or not entries.size:
            raise ValueError(
                f"neighbours are {near.shape} and entries {entries.shape}; expected [I, edges], [S]"
            )
        for name, array, low in (("neighbours", near, -1), ("entries", entries, 0)):
            if array.dtype != np.int32:
                raise ValueError(f"{name} are {array.dtype}; expected int32")
            if int(array.min()) < low or int(array.max()) >= len(near):
                raise ValueError(
                    f"{name} span {array.min()}..{array.max()}; the graph has {len(near)} items"
                )

    @property
    def num_items(self) -> int:
        """I, the number of items."""
        return len(self.neighbours)

    def save(self, path: Path) -> None:
        """Writes a safetensors file."""
        with whole_file(path) as new:
            save_file({"neighbours": self.neighbours, "entries": self.entries}, new)

    @staticmethod
    def load(path: Path) -> ItemLinks:
        """Reads what `save` wrote. Raises ValueError naming the file if it is damaged."""
        try:
            return ItemLinks(**read_arrays(path, ("neighbours", "entries")))
        except ValueError as error:
            raise ValueError(f"{path}: not an item graph ({error})") from error


def link_items(
    codes: np.ndarray, codebooks: Sequence[np.ndarray], edges: int = EDGES, seed: int = 0
) -> ItemLinks:
    """Links every item to its most similar items.

    Up to 32,768 items all short vectors are compared; beyond that an inverted file is searched.
    Memory grows linearly with I.

    Args:
        codes: [I, L] integer codes.
        codebooks: Per level [C_l, E] float32 embeddings of the codes, of any norm.
        edges: Edges per item. There are fewer if the catalogue has fewer other items.
        seed: Seed of sampling and clustering.

    Raises:
        ValueError: If the parts do not fit each other.
    """
    items, levels = codes.shape
    if len(codebooks) != levels or not items:
        raise ValueError(f"codes are {codes.shape}; expected [items, {len(codebooks)}]")
    if edges < 1:
        raise ValueError(f"edges is {edges}; expected at least 1")
    books = [_unit(book) for book in codebooks]
    vectors = _short_vectors(codes, books, seed)
    entries = _entries(vectors, seed)
    edges = min(edges, items - 1)
    if not edges:
        return ItemLinks(np.full((items, 1), -1, dtype=np.int32), entries)
    near = _search(vectors, min(items - 1, MARGIN * edges), seed)
    similarity = _similarity(codes, books, near)
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :edges]
    return ItemLinks(np.take_along_axis(near, order, axis=1), entries)


def _unit(book: np.ndarray) -> np.ndarray:
    """Returns rows of length 1; zero rows stay zero."""
    length = np.linalg.norm(book, axis=1, keepdims=True)
    return np.asarray(book / np.where(length > 0, length, 1), dtype=np.float32)


def _short_vectors(codes: np.ndarray, books: list[np.ndarray], seed: int) -> np.ndarray:
    """Returns [I, at most 256] float32 concatenated code embeddings on their principal axes."""
    size = max(1, WIDE_DIM // len(books))
    wide = []
    for level, book in enumerate(books):
        used = np.bincount(codes[:, level], minlength=len(book)).astype(np.float32)
        wide.append(book @ _main_axes((book * used[:, None]).T @ book, size))
    sample = np.random.default_rng(seed).permutation(len(codes))[:SAMPLE]
    some = _end_to_end(codes[sample], wide)
    axes = _main_axes(some.T @ some, SHORT_DIM)
    short = np.empty((len(codes), axes.shape[1]), dtype=np.float32)
    for start in range(0, len(codes), CHUNK):
        part = slice(start, start + CHUNK)
        short[part] = _end_to_end(codes[part], wide) @ axes
    return short


def _end_to_end(codes: np.ndarray, books: list[np.ndarray]) -> np.ndarray:
    """Returns [n, sum of widths], the concatenated code embeddings of each item."""
    return np.concatenate([book[codes[:, level]] for level, book in enumerate(books)], axis=1)


def _main_axes(products: np.ndarray, count: int) -> np.ndarray:
    """Returns [n, count] eigenvectors of the largest eigenvalues of a symmetric [n, n] matrix."""
    axes: np.ndarray = np.linalg.eigh(products)[1][:, ::-1][:, :count]
    return axes


def _entries(vectors: np.ndarray, seed: int) -> np.ndarray:
    """Returns the items nearest to k-means centroids, about 2 sqrt(I) of them."""
    count = min(len(vectors), max(64, 2 * math.isqrt(len(vectors))))
    means = faiss.Kmeans(
        vectors.shape[1],
        count,
        niter=ENTRY_ROUNDS,
        seed=seed + 1,
        min_points_per_centroid=1,
        max_points_per_centroid=64,
    )
    means.train(vectors)
    centroids = np.ascontiguousarray(means.centroids, dtype=np.float32)
    return np.unique(faiss.knn(centroids, vectors, 1)[1]).astype(np.int32)


def _search(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Returns [I, count] int32 other items with the largest inner products, padded with -1."""
    items = len(vectors)
    index = _index(vectors, seed)
    index.add(vectors)
    found = np.empty((items, count), dtype=np.int32)
    for start in range(0, items, CHUNK):
        near = index.search(vectors[start : start + CHUNK], count + 1)[1]
        own = near == np.arange(start, start + len(near))[:, None]
        # Exactly one entry per row is dropped: the item itself, or else its last neighbour.
        own[~own.any(axis=1), -1] = True
        found[start : start + CHUNK] = near[~own].reshape(-1, count)
    return found


def _index(vectors: np.ndarray, seed: int) -> faiss.Index:
    """Returns a trained, empty index of inner products, exact for up to 32,768 items."""
    items, dim = vectors.shape
    if items <= EXACT_ITEMS:
        return faiss.IndexFlatIP(dim)
    lists = 4 * math.isqrt(items)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed, index.cp.niter, index.nprobe = seed + 1, ENTRY_ROUNDS, PROBES
    index.train(vectors[np.random.default_rng(seed).permutation(items)[: 40 * lists]])
    return index


def _similarity(codes: np.ndarray, books: list[np.ndarray], near: np.ndarray) -> np.ndarray:
    """Returns [I, n] exact similarity times L, -inf for padding.

    A level with more than 8,192 codes would need too large a table of code pairs. It is left out if
    other levels remain.
    """
    known = [level for level, book in enumerate(books) if len(book) <= MAX_EXACT_CODES]
    if not known:  # preserve the order of the index
        return np.where(near < 0, -np.inf, -np.arange(near.shape[1], dtype=np.float32))
    total = np.zeros(near.shape, dtype=np.float32)
    for level in known:
        pairs = books[level] @ books[level].T
        column = codes[:, level]
        for start in range(0, len(near), CHUNK):
            part = slice(start, start + CHUNK)
            total[part] += pairs[column[part, None], column[near[part]]]
    total[near < 0] = -np.inf
    return total
