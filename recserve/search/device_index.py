"""The bridge between tensors and faiss on a CUDA device: a version's vector index there.

faiss reads and writes tensors in place, ordered on torch's current stream. So a search neither
waits for the device nor moves queries to the host. The index of the host says what the device
holds: it is edited first, and faiss's own indexes on a device cannot remove items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from recserve.core.request import VectorIndex
from recserve.kernels.host import on_device
from recserve.models.growable_table import with_rows

WORK_BYTES = 256 * 2**20  # bound on what a deep search of many queries holds at a time
FOUND_BYTES = 32  # scores, places and rows of one item that was found
VectorsOf = Callable[[np.ndarray], np.ndarray]


class HostIndex(VectorIndex, Protocol):
    """A version's index on the host: `VersionIndex` of features/vectors/vector_index.py."""

    @property
    def base(self) -> Any:
        """Built index, a `FaissIndex`."""

    @property
    def num_later(self) -> int:
        """Number of rows that were added after the base."""

    def base_rows(self) -> np.ndarray:
        """Returns the rows in the base."""

    def later_rows(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows and vectors of the later rows from number `start` on."""

    def at(self, num_rows: int, removed_rows: np.ndarray, vectors_of: VectorsOf) -> HostIndex:
        """Returns the index of the next version."""

    def fold(self, removed_rows: np.ndarray, vectors_of: VectorsOf) -> HostIndex:
        """Returns an index of the same version with all live rows in a new base."""


@dataclass(frozen=True)
class DeviceIndex:
    """The immutable vector index of one version, on the device.

    The vectors of a base and its later rows are one table, which versions share and append to. A
    flat index compares the queries with all of it. Inverted lists hold the base once more; the
    later rows are then searched beside them.

    Attributes:
        host: The same index on the host.
        faiss: faiss on the device, a `FaissGpu` of features/vectors/faiss_gpu.py.
        table: [capacity, E] float32, the base's vectors first.
        row_of: [capacity] int64 item row of each vector.
        lists: Inverted lists of the base, `GpuLists`; None for a flat index.
    """

    host: HostIndex
    faiss: Any
    table: Tensor
    row_of: Tensor
    lists: Any

    @staticmethod
    def on(host: HostIndex, faiss: Any, device: torch.device) -> DeviceIndex:
        """Copies the base of an index without later rows to the device."""
        rows = host.base_rows()
        table = on_device(host.vectors(rows), device, torch.float32)
        lists = host.base.lists_on(faiss, _stream(device))
        return DeviceIndex(host, faiss, table, on_device(rows, device, torch.int64), lists)

    @property
    def num_items(self) -> int:
        """Number of vectors, as on the host."""
        return self.host.num_items

    def at(self, num_rows: int, removed_rows: np.ndarray, vectors_of: VectorsOf) -> DeviceIndex:
        """Returns the index of the next version; only the rows that it adds are copied."""
        host = self.host.at(num_rows, removed_rows, vectors_of)
        added, new = host.later_rows(self.host.num_later)
        if not added.size:
            return replace(self, host=host)
        table = with_rows(self.table, self.num_items, torch.from_numpy(new))
        row_of = with_rows(self.row_of, self.num_items, torch.from_numpy(added))
        return replace(self, host=host, table=table, row_of=row_of)

    def fold(self, removed_rows: np.ndarray, vectors_of: VectorsOf) -> DeviceIndex:
        """Returns an index of the same version with all live rows in a new base."""
        host = self.host.fold(removed_rows, vectors_of)
        return DeviceIndex.on(host, self.faiss, self.table.device)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Implements `VectorIndex.vectors` of core/request.py, from the host."""
        return self.host.vectors(rows)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Implements `VectorIndex.search` of core/request.py, for queries of the host."""
        there = on_device(queries, self.table.device, torch.float32)
        found = [[x.cpu().numpy() for x in self.nearest(part, k)] for part in _parts(there, k)]
        rows, scores = (np.concatenate(column) for column in zip(*found, strict=True))
        return rows, scores

    def search_then_read(self, queries: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Searches, then reads queries and results from the device, at once if the memory allows.

        Args:
            queries: [..., E] unit vectors of any float type.
            k: Items per query, at least 1.

        Returns:
            The queries [..., E] float32, and item rows [..., k], -1 where there are fewer items.
        """
        flat = queries.flatten(0, -2).float().contiguous()
        read = np.concatenate(
            [
                torch.cat([part.view(torch.int32), self.nearest(part, k)[0].int()], 1).cpu().numpy()
                for part in _parts(flat, k)
            ]
        )
        shape, size = queries.shape[:-1], flat.shape[1]
        vectors = np.ascontiguousarray(read[:, :size]).view(np.float32)
        return vectors.reshape(*shape, size), read[:, size:].reshape(*shape, k).astype(np.int64)

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns the nearest items of each query, best first, without leaving the device.

        Args:
            queries: [n, E] float32 unit vectors.
            k: Items per query, at least 1.

        Returns:
            Item rows [n, k] int64 and inner products [n, k] float32. Rows are -1 where there are
            fewer items.
        """
        total, base = self.num_items, self.host.base
        probed = base.num_probed(k) if self.lists is not None else 0
        most = self.faiss.max_selected
        if self.lists is None or probed == base.num_lists or max(k, probed) > most:
            scores, rows = self._compare(queries, 0, min(k, total))
        else:
            scores, rows = self._outputs(queries, k)
            self.lists.search(queries, k, probed, scores, rows, _stream(queries.device))
            if self.host.num_later:
                later = self._compare(queries, base.num_items, min(k, self.host.num_later))
                scores = torch.cat([scores, later[0]], 1)
                rows = torch.cat([rows, later[1]], 1)
                order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
                scores, rows = scores.gather(1, order), rows.gather(1, order)
        missing = k - rows.shape[1]
        if missing:
            rows = torch.nn.functional.pad(rows, (0, missing), value=-1)
            scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        return rows, scores

    def _compare(self, queries: Tensor, first: int, k: int) -> tuple[Tensor, Tensor]:
        """Returns scores and rows [n, k] of the nearest vectors from number `first` on, exactly."""
        vectors, stream = self.table[first : self.num_items], _stream(queries.device)
        scores, places = self._outputs(queries, k)
        if 0 < k <= self.faiss.max_selected:
            self.faiss.nearest(queries, vectors, k, scores, places, stream)
        elif k:
            step = max(1, WORK_BYTES // (4 * len(vectors)))
            for start in range(0, len(queries), step):
                part = slice(start, start + step)
                every = scores.new_empty(len(queries[part]), len(vectors))
                self.faiss.nearest(queries[part], vectors, -1, every, None, stream)
                best = every.sort(dim=1, descending=True, stable=True)
                scores[part], places[part] = best.values[:, :k], best.indices[:, :k]
        # A query that is not finite finds nothing; its places are -1.
        rows = self.row_of[first : self.num_items][places.clamp(min=0)]
        return scores, torch.where(places < 0, places, rows)

    def _outputs(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores = queries.new_empty(len(queries), k)
        return scores, torch.empty_like(scores, dtype=torch.int64)


def _parts(queries: Tensor, k: int) -> tuple[Tensor, ...]:
    """Divides queries [n, E] so that the results of a part fit into WORK_BYTES."""
    return torch.split(queries, max(1, WORK_BYTES // (FOUND_BYTES * k)))


def _stream(device: torch.device) -> int:
    """Returns the handle of torch's current stream on a device."""
    return int(torch.cuda.current_stream(device).cuda_stream)
