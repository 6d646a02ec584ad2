"""A stand-in for the calls of faiss that only its builds for GPUs have: computed on the CPU.

Names, parameters and limits are those of the wheel faiss-gpu 1.15. Searches take the addresses of
arrays on the pretended device (pretend_cuda.py) only: an address of the host is an error, and so is
another stream than torch's.
"""

import ctypes
from contextlib import contextmanager

import faiss
import numpy as np
import pytest

from recserve.features.vectors import faiss_gpu
from tests.support.pretend_cuda import STREAM, PretendTensor

MOST = 2048


def array_at(pointer, shape, kind):
    """Returns the array at faiss's pointer to memory of the device."""
    address = int(pointer)
    assert PretendTensor.holds(address), "an array of the host on the way of a request"
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), shape)


class Resources:
    def __init__(self):
        self.calls, self.scratch, self._stream = 0, None, None

    def setTempMemory(self, size):
        self.scratch = size

    def getDefaultStream(self, device):
        return self._stream

    def setDefaultStream(self, device, stream):
        assert device == 0
        self._stream = stream

    def begin_on_host(self):
        """Counts a call for arrays of the host."""
        self.calls += 1
        assert self.scratch is not None

    def begin(self):
        """Counts a search and checks that it is ordered on torch's stream in bounded memory."""
        self.begin_on_host()
        assert self._stream == ("stream", STREAM)


class DistanceParams:
    __slots__ = (
        "device", "metric", "k", "dims", "vectors", "vectorType", "vectorsRowMajor", "numVectors",
        "queries", "queryType", "queriesRowMajor", "numQueries", "outDistances", "outIndices",
        "outIndicesType",
    )  # fmt: skip


def brute_force(resources, job):
    """`bfKnn`: the k best inner products, or all of them for k = -1."""
    resources.begin()
    assert job.device == 0 and job.metric == faiss.METRIC_INNER_PRODUCT
    assert job.queryType == job.vectorType == faiss.DistanceDataType_F32
    assert job.queriesRowMajor and job.vectorsRowMajor
    assert job.k == -1 or 1 <= job.k <= min(MOST, job.numVectors)
    queries = array_at(job.queries, (job.numQueries, job.dims), ctypes.c_float)
    vectors = array_at(job.vectors, (job.numVectors, job.dims), ctypes.c_float)
    width = job.numVectors if job.k == -1 else job.k
    scores = array_at(job.outDistances, (job.numQueries, width), ctypes.c_float)
    if job.k == -1:
        scores[:] = queries @ vectors.T
        return
    assert job.outIndicesType == faiss.IndicesDataType_I64
    places = array_at(job.outIndices, (job.numQueries, width), ctypes.c_int64)
    scores[:], places[:] = faiss.knn(queries, vectors, job.k, faiss.METRIC_INNER_PRODUCT)


class ListsConfig:
    __slots__ = ("device", "use_cuvs")


class Lists:
    """`GpuIndexIVFFlat`: cannot be edited, searched by address only."""

    def __init__(self, resources, index, config):
        assert config.device == 0 and not config.use_cuvs and index.is_trained
        self._resources, self._index = resources, faiss.clone_index(index)

    def search_ex(self, n, x, numeric_type, k, distances, labels, params=None):
        self._resources.begin()
        assert numeric_type == faiss.Float32 and 1 <= k <= MOST and 1 <= params.nprobe <= MOST
        queries = array_at(x, (n, self._index.d), ctypes.c_float)
        scores = array_at(distances, (n, k), ctypes.c_float)
        rows = array_at(labels, (n, k), ctypes.c_int64)
        scores[:], rows[:] = self._index.search(queries, k, params=params)


def index_cpu_to_gpu(provider, device, index, options=None):
    """Returns the index itself, for arrays of the host, as `build` has them."""
    assert device == 0
    provider.begin_on_host()
    return index


@contextmanager
def installed():
    """Gives faiss the calls of a build for one GPU. Yields their shared resource object."""
    names = {
        "StandardGpuResources": Resources, "GpuDistanceParams": DistanceParams,
        "bfKnn": brute_force, "GpuIndexIVFFlatConfig": ListsConfig, "GpuIndexIVFFlat": Lists,
        "DistanceDataType_F32": 1, "IndicesDataType_I64": 1, "get_num_gpus": lambda: 1,
        "cast_integer_to_cudastream_t": lambda handle: ("stream", handle),
        "index_cpu_to_gpu": index_cpu_to_gpu,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(faiss, name, value, raising=False)
        faiss_gpu.faiss_gpu.cache_clear()
        yield faiss_gpu.faiss_gpu().resources
    faiss_gpu.faiss_gpu.cache_clear()
