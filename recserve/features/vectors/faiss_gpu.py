"""faiss on a CUDA device, for arrays that are already in the device's memory.

This room knows no torch. Arrays are of any library that has the CUDA array interface, as tensors
do; `search/device_index.py` passes them. No call waits for the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import faiss as faiss_package

from recserve.extras import FAISS_FOR_CUDA

faiss: Any = faiss_package  # its type stubs lack what only builds for GPUs have
MAX_SELECTED = 2048  # faiss's kernels select at most so many neighbours or lists per query
SCRATCH_BYTES = 256 * 2**20  # temporary memory that all searches on a device share


class DeviceArray(Protocol):
    """An array in the memory of a CUDA device."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape and type, as Numba documents them."""


class FaissGpu:
    """faiss on one device.

    All indexes share one resource object, which bounds the temporary memory. faiss does not allow
    two threads to use it at a time, so calls take turns.

    Attributes:
        device: Number of the CUDA device.
        resources: faiss's memory and handles on it.
        max_selected: Most neighbours, or lists, that a search can select.
    """

    max_selected = MAX_SELECTED

    def __init__(self, device: int) -> None:
        """Creates the resource object of a device.

        Args:
            device: Number of the CUDA device.
        """
        self.device = device
        self.resources = faiss.StandardGpuResources()
        self.resources.setTempMemory(SCRATCH_BYTES)
        self.resources.getDefaultStream(device)  # allocates now, before the KV cache fills the rest
        self._lock = threading.Lock()

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Orders the calls of a block on a CUDA stream, given by its handle. Other threads wait."""
        with self._lock:
            handle = faiss.cast_integer_to_cudastream_t(stream)
            self.resources.setDefaultStream(self.device, handle)
            yield

    def nearest(
        self,
        queries: DeviceArray,
        vectors: DeviceArray,
        k: int,
        scores: DeviceArray,
        places: DeviceArray | None,
        stream: int,
    ) -> None:
        """Finds the k vectors with the largest inner products, best first.

        Args:
            queries: [n, E] float32.
            vectors: [I, E] float32.
            k: Neighbours, 1..min(I, MAX_SELECTED). -1 computes all inner products instead, in the
                order of the vectors.
            scores: [n, k] float32, or [n, I], to write.
            places: [n, k] int64 indices of vectors, to write. None for k = -1.
            stream: Handle of the CUDA stream that orders the search.
        """
        job = faiss.GpuDistanceParams()
        job.device, job.metric, job.k = self.device, faiss.METRIC_INNER_PRODUCT, k
        job.queries, (job.numQueries, job.dims) = _floats(queries)
        job.vectors, (job.numVectors, _) = _floats(vectors)
        job.queryType = job.vectorType = faiss.DistanceDataType_F32
        job.queriesRowMajor = job.vectorsRowMajor = True
        job.outDistances, _ = _floats(scores)
        if places is not None:
            job.outIndices, job.outIndicesType = _integers(places), faiss.IndicesDataType_I64
        with self.on_stream(stream):
            faiss.bfKnn(self.resources, job)

    def lists(self, index: Any, stream: int) -> GpuLists:
        """Copies a trained `faiss.IndexIVFFlat` of the host to the device."""
        config = faiss.GpuIndexIVFFlatConfig()
        config.device = self.device
        config.use_cuvs = "CUVS" in faiss.get_compile_options()
        with self.on_stream(stream):
            return GpuLists(self, faiss.GpuIndexIVFFlat(self.resources, index, config))

    def copy(self, index: Any) -> Any:
        """Returns an index of the host on the device, for arrays of the host: `build` uses it."""
        return faiss.index_cpu_to_gpu(self.resources, self.device, index)


class GpuLists:
    """Inverted lists on the device."""

    def __init__(self, gpu: FaissGpu, index: Any) -> None:
        self._gpu, self._index = gpu, index

    def search(
        self,
        queries: DeviceArray,
        k: int,
        nprobe: int,
        scores: DeviceArray,
        rows: DeviceArray,
        stream: int,
    ) -> None:
        """Finds k neighbours in the `nprobe` lists nearest to each query, best first.

        Args:
            queries: [n, E] float32.
            k: Neighbours, 1..MAX_SELECTED.
            nprobe: Lists to read, 1..MAX_SELECTED.
            scores: [n, k] float32 to write.
            rows: [n, k] int64 item rows to write, -1 where the lists hold fewer.
            stream: Handle of the CUDA stream that orders the search.
        """
        address, (count, _) = _floats(queries)
        found, _ = _floats(scores)
        probe = faiss.SearchParametersIVF(nprobe=nprobe)
        with self._gpu.on_stream(stream):
            self._index.search_ex(count, address, faiss.Float32, k, found, _integers(rows), probe)


def _floats(array: DeviceArray) -> tuple[Any, tuple[int, ...]]:
    """Returns faiss's pointer to a contiguous float32 array of the device, and its shape."""
    about = array.__cuda_array_interface__
    assert about["typestr"] == "<f4" and about.get("strides") is None, about
    return faiss.cast_integer_to_float_ptr(about["data"][0]), about["shape"]


def _integers(array: DeviceArray) -> Any:
    """Returns faiss's pointer to a contiguous int64 array of the device."""
    about = array.__cuda_array_interface__
    assert about["typestr"] == "<i8" and about.get("strides") is None, about
    return faiss.cast_integer_to_idx_t_ptr(about["data"][0])


def has_gpu() -> bool:
    """Whether this faiss is built for GPUs and finds one."""
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


@functools.cache
def faiss_gpu(device: int = 0) -> FaissGpu:
    """Returns faiss on a device, the same object in the whole process.

    Raises:
        ValueError: If faiss is built for CPUs only or finds no GPU.
    """
    if not has_gpu():
        raise ValueError(
            f"this faiss computes on CPUs only or finds no GPU; for an NVIDIA GPU: {FAISS_FOR_CUDA}"
        )
    return FaissGpu(device)
