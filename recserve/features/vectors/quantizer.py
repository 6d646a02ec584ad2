"""Quantisers map a vector to L codes.

A quantiser is frozen after fitting, so new items get comparable codes. Two kinds exist:

- Residual: level l quantises what the levels before it left over. That is TIGER's scheme with
  k-means per level instead of a network.
- Product: after a rotation, each of L sub-vectors has its own codebook (OPQ, Ge et al. 2013, used
  for RPG's ids).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import faiss
import numpy as np
from safetensors.numpy import save_file

from recserve.features.vectors.faiss_gpu import FaissGpu
from recserve.features.vectors.faiss_threads import one_thread
from recserve.files import UnreadableFile, read_arrays, read_json_object, whole_file

MAX_LEVELS = 64
MAX_CODES = 65_536
KMEANS_ROUNDS = 15
POINTS_PER_CODE = 128
MIN_WIDTH = 16
ONE_THREAD_BELOW = 4096  # vectors; a thread pool costs more than it saves for fewer
OPQ_KMEANS_ROUNDS = (8, 2, 2, 2, 8)


class Quantizer(Protocol):
    """Interface of both quantisers."""

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Codes of each level."""

    @property
    def dim(self) -> int:
        """F, the size of the vectors."""

    def encode(self, vectors: np.ndarray, gpu: FaissGpu | None = None) -> np.ndarray:
        """Maps vectors [I, F] to codes [I, L] uint16, on the CPU or a GPU."""

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Maps codes [I, L] to vectors [I, F] float32."""

    def save(self, folder: Path) -> None:
        """Writes config.json and quantizer.safetensors."""


@dataclass(frozen=True)
class ResidualQuantizer:
    """A vector is the sum of one codebook entry per level.

    Attributes:
        codebooks: Per level [C, F] float32.
    """

    codebooks: tuple[np.ndarray, ...]

    @staticmethod
    def fit(
        vectors: np.ndarray, sizes: Sequence[int], seed: int, gpu: FaissGpu | None = None
    ) -> ResidualQuantizer:
        """Fits k-means on the residual, level by level, with at most 128 vectors per code.

        Args:
            vectors: [I, F] item vectors.
            sizes: [L] codes of each level. Fewer items than codes give codebooks of I entries.
            seed: Seed of k-means.
            gpu: Where to cluster; None is the CPU. Codes may differ between devices.

        Raises:
            ValueError: If a size is out of range or there are no vectors.
        """
        residual = _check_fit("residual", vectors, sizes)
        codebooks = []
        for level, codes in enumerate(sizes):
            size = min(codes, len(residual))
            codebooks.append(_means(residual, size, KMEANS_ROUNDS, seed + level + 1, gpu=gpu))
            residual = residual - codebooks[-1][_nearest(codebooks[-1], residual, gpu)]
        return ResidualQuantizer(tuple(codebooks))

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Codes of each level."""
        return tuple(len(book) for book in self.codebooks)

    @property
    def dim(self) -> int:
        """F, the size of the vectors."""
        return int(self.codebooks[0].shape[1])

    def encode(self, vectors: np.ndarray, gpu: FaissGpu | None = None) -> np.ndarray:
        """Maps [I, F] to codes [I, L] uint16, the nearest entry level by level."""
        residual = _check_width(vectors, self.codebooks[0].shape[1])
        codes = np.empty((len(residual), len(self.codebooks)), dtype=np.uint16)
        for level, book in enumerate(self.codebooks):
            nearest = _nearest(book, residual, gpu)
            codes[:, level] = nearest
            residual = residual - book[nearest]
        return codes

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Maps codes [I, L] to [I, F] float32, the sum of their entries."""
        picked = [book[codes[:, level]] for level, book in enumerate(self.codebooks)]
        return np.asarray(np.sum(picked, axis=0), dtype=np.float32)

    def save(self, folder: Path) -> None:
        """Writes config.json and quantizer.safetensors."""
        arrays = {f"level_{level}": book for level, book in enumerate(self.codebooks)}
        _write(folder, {"kind": "residual", "levels": len(self.codebooks)}, arrays)

    @staticmethod
    def load(folder: Path) -> ResidualQuantizer:
        """Reads what `save` wrote. Raises ValueError if it is damaged or of another kind."""
        levels = _levels(folder, "residual")
        names = [f"level_{level}" for level in range(levels)]
        arrays = _read(folder, names)
        books = tuple(arrays[name] for name in names)
        sizes = [book.shape for book in books]
        if any(len(size) != 2 or size[1] != sizes[0][1] for size in sizes):
            raise ValueError(f"{folder}: codebooks are {sizes}; expected [C, F] with the same F")
        check_sizes("residual", [len(book) for book in books], least=1)
        return ResidualQuantizer(books)


@dataclass(frozen=True)
class ProductQuantizer:
    """Each sub-vector of the rotated vector is one codebook entry.

    Attributes:
        rotation: [F', F] float32, where F' is the next multiple of L.
        codebooks: [L, C, F' / L] float32.
    """

    rotation: np.ndarray
    codebooks: np.ndarray

    @staticmethod
    def fit(
        vectors: np.ndarray, sizes: Sequence[int], seed: int, gpu: FaissGpu | None = None
    ) -> ProductQuantizer:
        """Fits rotation and codebooks in turns (optimised product quantisation).

        Args:
            vectors: [I, F] item vectors.
            sizes: [L] codes of each sub-vector, all equal, typically for 16 to 64 sub-vectors.
                Fewer items than codes give codebooks of I entries.
            seed: Seed of sampling and k-means.
            gpu: Where to cluster; None is the CPU. Codes may differ between devices.

        Raises:
            ValueError: If a size is out of range or differs from another, L exceeds F, or there
                are no vectors.
        """
        vectors = _check_fit("product", vectors, sizes)
        levels, codes, dim = len(sizes), sizes[0], vectors.shape[1]
        if levels > dim:
            raise ValueError(
                f"levels is {levels}; a product quantiser of {dim} dimensions has at most {dim}"
            )
        size = min(codes, len(vectors))
        if len(vectors) > POINTS_PER_CODE * size:
            rng = np.random.default_rng(seed)
            chosen = rng.choice(len(vectors), POINTS_PER_CODE * size, replace=False)
            vectors = vectors[np.sort(chosen)]
        padded = np.pad(vectors, ((0, 0), (0, -dim % levels)))
        width = padded.shape[1] // levels
        rotation = np.eye(padded.shape[1], dtype=np.float32)
        books: list[np.ndarray | None] = [None] * levels
        for turn, rounds in enumerate(OPQ_KMEANS_ROUNDS):
            parts = np.split(padded @ rotation.T, levels, axis=1)
            books = [
                _means(_widen(part), size, rounds, seed + level + 1, book, gpu)
                for level, (part, book) in enumerate(zip(parts, books, strict=True))
            ]
            if turn + 1 < len(OPQ_KMEANS_ROUNDS):
                # Orthogonal Procrustes: the rotation that best fits the decoded vectors.
                decoded = [
                    book[_nearest(book, _widen(part), gpu), :width]
                    for part, book in zip(parts, books, strict=True)
                    if book is not None
                ]
                left, _, right = np.linalg.svd(np.concatenate(decoded, axis=1).T @ padded)
                rotation = (left @ right).astype(np.float32)
        codebooks = np.stack([book[:, :width] for book in books if book is not None])
        return ProductQuantizer(np.ascontiguousarray(rotation[:, :dim]), codebooks)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Codes of each level."""
        return (int(self.codebooks.shape[1]),) * len(self.codebooks)

    @property
    def dim(self) -> int:
        """F, the size of the vectors."""
        return int(self.rotation.shape[1])

    def encode(self, vectors: np.ndarray, gpu: FaissGpu | None = None) -> np.ndarray:
        """Maps [I, F] to codes [I, L] uint16, the nearest entry of each sub-vector."""
        turned = _check_width(vectors, self.rotation.shape[1]) @ self.rotation.T
        codes = np.empty((len(turned), len(self.codebooks)), dtype=np.uint16)
        for level, part in enumerate(np.split(turned, len(self.codebooks), axis=1)):
            codes[:, level] = _nearest(_widen(self.codebooks[level]), _widen(part), gpu)
        return codes

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Maps codes [I, L] to [I, F] float32, rotated back."""
        parts = [book[codes[:, level]] for level, book in enumerate(self.codebooks)]
        return np.asarray(np.concatenate(parts, axis=1) @ self.rotation, dtype=np.float32)

    def save(self, folder: Path) -> None:
        """Writes config.json and quantizer.safetensors."""
        arrays = {"rotation": self.rotation, "codebooks": self.codebooks}
        _write(folder, {"kind": "product", "levels": len(self.codebooks)}, arrays)

    @staticmethod
    def load(folder: Path) -> ProductQuantizer:
        """Reads what `save` wrote. Raises ValueError if it is damaged or of another kind."""
        levels = _levels(folder, "product")
        arrays = _read(folder, ("rotation", "codebooks"))
        rotation, books = arrays["rotation"], arrays["codebooks"]
        if (
            rotation.ndim != 2
            or books.ndim != 3
            or len(books) != levels
            or rotation.shape[0] != books.shape[0] * books.shape[2]
        ):
            raise ValueError(
                f"{folder}: rotation is {rotation.shape} and codebooks {books.shape}; expected "
                f"[F', F] and [{levels}, C, F' / {levels}]"
            )
        check_sizes("product", [books.shape[1]] * levels, least=1)
        return ProductQuantizer(rotation, books)


QUANTIZERS: dict[str, type[ResidualQuantizer] | type[ProductQuantizer]] = {
    "residual": ResidualQuantizer,
    "product": ProductQuantizer,
}


def fit_quantizer(
    kind: str, vectors: np.ndarray, sizes: Sequence[int], seed: int, gpu: FaissGpu | None = None
) -> Quantizer:
    """Fits the quantiser of a kind with sizes [L]. Raises ValueError for an unknown kind."""
    return _by_name(kind).fit(vectors, sizes, seed, gpu)


def load_quantizer(folder: Path) -> Quantizer:
    """Loads the quantiser of a folder, of either kind. Raises ValueError if it is damaged."""
    return _by_name(str(_config(folder).get("kind"))).load(folder)


def reconstruction_error(vectors: np.ndarray, decoded: np.ndarray) -> float:
    """Returns the squared error as a share of the variance.

    0 is exact; 1 is no better than the mean.
    """
    spread = float(np.square(vectors - vectors.mean(axis=0)).sum())
    return float(np.square(vectors - decoded).sum()) / spread if spread > 0 else 0.0


def _by_name(kind: str) -> type[ResidualQuantizer] | type[ProductQuantizer]:
    if kind not in QUANTIZERS:
        raise ValueError(f"quantizer is {kind!r}; expected one of {', '.join(QUANTIZERS)}")
    return QUANTIZERS[kind]


def _means(
    vectors: np.ndarray,
    size: int,
    rounds: int,
    seed: int,
    start: np.ndarray | None = None,
    gpu: FaissGpu | None = None,
) -> np.ndarray:
    """Returns [size, F] float32 k-means centroids. `start` [size, F] are initial centroids."""
    model = faiss.Kmeans(
        vectors.shape[1],
        size,
        niter=rounds,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=POINTS_PER_CODE,
    )
    if gpu is not None:
        model.index = gpu.copy(model.index)
    model.train(vectors, init_centroids=start)
    return np.ascontiguousarray(model.centroids, dtype=np.float32)


def _widen(vectors: np.ndarray) -> np.ndarray:
    """Pads to 16 columns with zeros: eight times faster than products of 4 or 8 columns."""
    return np.pad(vectors, ((0, 0), (0, max(0, MIN_WIDTH - vectors.shape[1]))))


def _nearest(book: np.ndarray, vectors: np.ndarray, gpu: FaissGpu | None = None) -> np.ndarray:
    """Returns [n] int64 nearest entry (Euclidean) of each vector."""
    index: faiss.Index = faiss.IndexFlatL2(book.shape[1])
    if gpu is not None:
        index = gpu.copy(index)
    index.add(book)
    with one_thread() if len(vectors) < ONE_THREAD_BELOW else nullcontext():
        nearest: np.ndarray = index.search(vectors, 1)[1][:, 0]
    return nearest


def check_sizes(kind: str, sizes: Sequence[int], least: int = 2) -> None:
    """Raises ValueError if no quantiser of this kind has these numbers of codes [L].

    A fitted one has fewer codes than `least` asks for if there are fewer items.
    """
    _by_name(kind)
    if not 1 <= len(sizes) <= MAX_LEVELS:
        raise ValueError(f"levels is {len(sizes)}; expected 1..{MAX_LEVELS}")
    for codes in sizes:
        if not least <= codes <= MAX_CODES:
            raise ValueError(f"codes is {codes}; expected {least}..{MAX_CODES}")
    if kind == "product" and len(set(sizes)) > 1:
        raise ValueError(
            f"codes are {', '.join(map(str, sizes))}; a product quantiser has the same number on "
            "each level"
        )


def _check_fit(kind: str, vectors: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Returns float32 vectors after checking the arguments of `fit`."""
    if vectors.ndim != 2 or not vectors.size:
        raise ValueError(f"vectors have shape {vectors.shape}; expected [items, dim], neither zero")
    check_sizes(kind, sizes)
    if not np.isfinite(vectors).all():
        raise ValueError("vectors hold values that are not finite")
    return np.ascontiguousarray(vectors, dtype=np.float32)


def _check_width(vectors: np.ndarray, dim: int) -> np.ndarray:
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(f"vectors have shape {vectors.shape}; the quantiser takes [items, {dim}]")
    return np.ascontiguousarray(vectors, dtype=np.float32)


def _write(folder: Path, config: dict[str, object], arrays: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with whole_file(folder / "quantizer.safetensors") as new:
        save_file(arrays, new)


def _config(folder: Path) -> dict[str, object]:
    try:
        return read_json_object(folder / "config.json")
    except UnreadableFile as error:
        raise ValueError(f"{folder}/config.json: not readable ({error})") from error


def _levels(folder: Path, kind: str) -> int:
    """Returns the number of levels of a quantiser of a kind."""
    config = _config(folder)
    if config.get("kind") != kind:
        raise ValueError(f"{folder}: quantiser of kind {config.get('kind')!r}; expected {kind!r}")
    levels = config.get("levels")
    if type(levels) is not int or not 1 <= levels <= MAX_LEVELS:
        raise ValueError(
            f"{folder}/config.json: levels is {levels!r:.80}; expected 1..{MAX_LEVELS}"
        )
    return levels


def _read(folder: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a quantiser by name."""
    arrays = read_arrays(folder / "quantizer.safetensors", names)
    for name, array in arrays.items():
        if array.dtype != np.float32 or not array.size:
            raise ValueError(
                f"{folder}/quantizer.safetensors: {name} is {array.dtype} {array.shape}; expected "
                "float32 values"
            )
    return arrays
