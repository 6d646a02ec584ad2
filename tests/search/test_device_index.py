"""`dense` and `specgr` with faiss on a pretended GPU: the CPU's items, and no query on the host."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.features.vectors.faiss_gpu import FaissGpu, faiss_gpu
from recserve.features.vectors.vector_index import FaissIndex, VersionIndex
from recserve.models.dense_retriever import item_vectors
from recserve.search import device_index
from recserve.search.device_index import DeviceIndex
from recserve.service.model_loader import item_index
from tests.support.device_worlds import ITEMS, NEW, assert_same, recommending
from tests.support.grids import covering
from tests.support.pretend_cuda import CUDA, PretendCuda
from tests.support.pretend_faiss import installed

DRAW = np.random.default_rng(0)


def unit(count):
    vectors = DRAW.standard_normal((count, 8)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


VECTORS, QUERIES = unit(1500), unit(7)


@pytest.fixture(autouse=True)
def plain_kernels(force_kernels):
    force_kernels("torch")


def check(index, k, reads=1):
    """So many reads, and the rows that the index of the host finds."""
    with PretendCuda() as device:
        queries = torch.from_numpy(QUERIES).to(CUDA)
        device.syncs.clear()
        vectors, rows = index.search_then_read(queries.view(7, 1, -1), k)
        assert device.counts() == {"read": reads}, device.table()
    np.testing.assert_array_equal(vectors[:, 0], QUERIES)
    np.testing.assert_array_equal(rows[:, 0], index.host.search(QUERIES, k)[0])


@pytest.mark.parametrize(
    "seed,flat_below", covering(range(4), {"lists": 60, "lists-later": 200, "flat": 5000})
)
def test_through_changes_and_folds_it_finds_what_the_host_finds(seed, flat_below, monkeypatch):
    """Searches wide and deep, beyond what faiss selects; versions stay what they were."""
    monkeypatch.setattr(FaissGpu, "max_selected", 64)
    draw = np.random.default_rng(seed)
    num_rows, gone, versions = 150, np.zeros(0, np.int64), []
    with installed() as resources, PretendCuda():
        host = VersionIndex.on(FaissIndex(VECTORS[:num_rows], flat_below))
        index = DeviceIndex.on(host, faiss_gpu(), CUDA)
        for step in range(24):
            num_rows += int(draw.integers(0, 30))
            back = draw.random(gone.size) < 0.2
            gone = np.union1d(gone[~back], draw.integers(0, num_rows, int(draw.integers(0, 12))))
            index = index.at(num_rows, gone, VECTORS.__getitem__)
            if step % 6 == 5:
                index = index.fold(gone, VECTORS.__getitem__)
            versions.append(index)
            check(index, int(draw.choice([1, 9, 40, 70, index.num_items, index.num_items + 3])))
        for version in versions:
            check(version, 9)
        assert resources.calls >= 2 * len(versions)
    assert (index.lists is None) == (flat_below == 5000)


@pytest.mark.parametrize("k", (9, 1500))
def test_results_beyond_the_memory_are_read_in_parts(k, monkeypatch):
    with installed(), PretendCuda():
        index = DeviceIndex.on(VersionIndex.on(FaissIndex(VECTORS)), faiss_gpu(), CUDA)
        monkeypatch.setattr(FaissGpu, "max_selected", 64)
        monkeypatch.setattr(device_index, "WORK_BYTES", 2 * k * device_index.FOUND_BYTES)
        check(index, k, reads=4)
        rows, scores = index.search(QUERIES, k)
    wanted = index.host.search(QUERIES, k)
    np.testing.assert_array_equal(rows, wanted[0])
    np.testing.assert_allclose(scores, wanted[1], atol=1e-6)


def test_items_that_all_go_leave_an_index_that_finds_none():
    none, every = np.zeros(0, np.int64), np.arange(60)
    with installed(), PretendCuda():
        host = VersionIndex.on(FaissIndex(VECTORS[:60]))
        empty = DeviceIndex.on(host, faiss_gpu(), CUDA).fold(every, VECTORS.__getitem__)
        check(empty, 3)
        check(empty.at(70, none, VECTORS.__getitem__), 20)


def ask(world, strategy, how, index):
    requests = world.ask("dense" if strategy == "specgr" else strategy, how)
    return [replace(one, strategy=strategy, index=index) for one in requests]


def version(world, flat_below):
    """The version of the catalogue that the world's requests of kind `live` have."""
    vectors = item_vectors(world.heads.retriever, world.model).numpy()
    return VersionIndex.on(FaissIndex(vectors[: len(ITEMS) - NEW], flat_below)), vectors


@pytest.mark.parametrize(
    "strategy,how,flat_below",
    covering(("dense", "specgr"), ("plain", "filters", "diversity", "live"), (20, 1000)),
)
def test_strategies_find_the_cpu_s_items(strategy, how, flat_below):
    here = recommending("cpu")
    none = np.zeros(0, np.int64)
    host, vectors = version(here, flat_below)
    host = host.at(len(ITEMS), none, vectors.__getitem__)
    expected = here.engine.run_many(ask(here, strategy, how, host))
    with installed() as resources, PretendCuda() as device:
        there = recommending("cuda")
        host, _ = version(there, flat_below)
        index = DeviceIndex.on(host, faiss_gpu(), CUDA).at(len(ITEMS), none, vectors.__getitem__)
        requests = ask(there, strategy, how, index)
        device.syncs.clear()
        assert_same(there.engine.run_many(requests), expected)
        assert resources.calls
        waits = {sync.where.split(":")[0] for sync in device.syncs}
        assert "search/strategies/dense.py" not in waits, device.table()
        own = {file for file in waits if file.startswith("search/")}
        assert strategy != "dense" or own == {"search/device_index.py"}, device.table()


@pytest.mark.parametrize(
    "setting,device,built",
    covering(("auto", "cpu", "cuda"), ("cpu", "cuda"), (True, False), pairs=True),
)
def test_the_setting_chooses(setting, device, built):
    with installed() if built else nullcontext(), PretendCuda():
        world = recommending(device)
        if setting == "cuda" and (device == "cpu" or not built):
            with pytest.raises(ValueError, match="index_device is cuda|faiss-gpu"):
                item_index(world.model, world.heads, setting)
            return
        there = setting != "cpu" and device == "cuda" and built
        index = item_index(world.model, world.heads, setting)
        assert isinstance(index, DeviceIndex if there else VersionIndex)
