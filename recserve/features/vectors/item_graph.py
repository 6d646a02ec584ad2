"""The item graph: for every item those whose codes mean nearly the same, without comparing all.

Similarity is the mean over levels of the cosine of the code embeddings (RPG, KDD 2025, section
3.3), which is the inner product of the items' code embeddings, laid end to end. Those vectors are
too wide to keep for every item, so they are cut to their main axes, first each level's, then those
of all levels together; what an index finds among the short vectors is then put in order by the
exact similarity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

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
    """neighbours [I, edges] int32: the most similar items, best first, -1 where there are fewer.
    entries [S] int32: items spread over the whole catalogue. Raises ValueError for other arrays.
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
        """I."""
        return len(self.neighbours)

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.neighbours.nbytes + self.entries.nbytes

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        save_file({"neighbours": self.neighbours, "entries": self.entries}, path)

    @staticmethod
    def load(path: Path) -> ItemLinks:
        """Read what `save` wrote. Raises ValueError naming the file if it is damaged."""
        try:
            arrays = load_file(path)
            return ItemLinks(arrays["neighbours"], arrays["entries"])
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path}: not an item graph ({error})") from error


def link_items(
    codes: np.ndarray, codebooks: Sequence[np.ndarray], edges: int = EDGES, seed: int = 0
) -> ItemLinks:
    """Link every item to its most similar ones.

    codes: [I, L] int. codebooks: per level [C_l, E] float32, embeddings of the codes, any length.
    edges: per item, fewer where there are fewer items. All short vectors are compared up to 32,768
    items; beyond, an inverted file is asked. Memory grows as I. Raises ValueError if the parts do
    not fit each other.
    """
    items, levels = codes.shape
    if len(codebooks) != levels or not items:
        raise ValueError(f"codes are {codes.shape}; codebooks name {len(codebooks)} levels")
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
    length = np.linalg.norm(book, axis=1, keepdims=True)
    return np.asarray(book / np.where(length > 0, length, 1), dtype=np.float32)


def _short_vectors(codes: np.ndarray, books: list[np.ndarray], seed: int) -> np.ndarray:
    """[I, at most 256] float32: the items' code embeddings end to end, on their main axes."""
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
    return np.concatenate([book[codes[:, level]] for level, book in enumerate(books)], axis=1)


def _main_axes(products: np.ndarray, count: int) -> np.ndarray:
    """[n, count] eigenvectors of the largest eigenvalues. products: [n, n], symmetric."""
    axes: np.ndarray = np.linalg.eigh(products)[1][:, ::-1][:, :count]
    return axes


def _entries(vectors: np.ndarray, seed: int) -> np.ndarray:
    """Items nearest to the centroids of k-means, about twice the root of all items."""
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
    """[I, count] int32 other items of the largest inner products, -1 where fewer were found."""
    items = len(vectors)
    index = _index(vectors, seed)
    index.add(vectors)
    found = np.empty((items, count), dtype=np.int32)
    for start in range(0, items, CHUNK):
        near = index.search(vectors[start : start + CHUNK], count + 1)[1]
        own = near == np.arange(start, start + len(near))[:, None]
        # An item that is not among its own nearest loses its last neighbour instead.
        own[~own.any(axis=1), -1] = True
        found[start : start + CHUNK] = near[~own].reshape(-1, count)
    return found


def _index(vectors: np.ndarray, seed: int) -> faiss.Index:
    """A trained, empty index of inner products: exact where the items are few."""
    items, dim = vectors.shape
    if items <= EXACT_ITEMS:
        return faiss.IndexFlatIP(dim)
    lists = 4 * math.isqrt(items)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed, index.cp.niter, index.nprobe = seed + 1, ENTRY_ROUNDS, PROBES
    index.train(vectors[np.random.default_rng(seed).permutation(items)[: 40 * lists]])
    return index


def _similarity(codes: np.ndarray, books: list[np.ndarray], near: np.ndarray) -> np.ndarray:
    """[I, n] exact similarity times L, -inf where there is no neighbour. A level of very many codes
    would need a table of all their pairs; it is left out where other levels remain.
    """
    known = [level for level, book in enumerate(books) if len(book) <= MAX_EXACT_CODES]
    if not known:  # keep the order of the index
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
