"""A forward pass of few operations runs on one thread. No other thread's number changes."""

import random
import threading

import pytest
import torch

from recserve.engine.runner import Runner
from recserve.kernels.attention.attention import tree_attention
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.native import threads
from recserve.kernels.tree import chain
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.adapters import DecoderAdapter
from recserve.models.inputs import NodeInputs
from recserve.models.packing import pack_weights
from tests.support.text_plain import drawn_model


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def number_elsewhere():
    """Returns how many threads a thread that begins now computes with."""
    numbers = []
    new = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    new.start()
    new.join()
    return numbers[0]


@pytest.mark.parametrize("packed", [False, True])
@torch.inference_mode()
def test_the_number_follows_from_the_operations(packed, monkeypatch):
    """Rows times weights of linear layers, just below the bound and at it."""
    model = drawn_model()
    weights = sum(w.numel() for w in model.decoder.parameters() if w.ndim == 2)
    if packed:
        pack_weights(model)
    head = 0 if model.head is None else 32 * 40
    seen = []

    def attention(*arguments):
        seen.append((torch.get_num_threads(), number_elsewhere()))
        return tree_attention(*arguments)

    adapter = DecoderAdapter(model)
    pool = KVPool(adapter.kv_shape, 4, 8, adapter.dtype, adapter.device)
    runner = Runner(adapter, pool, attention)
    rows = random.randrange(1, 32)
    for bound, number in ((rows * (weights + head) + 1, 1), (rows * (weights + head), 3)):
        monkeypatch.setattr(threads, "SMALL", bound)
        inputs, prefixes = NodeInputs(torch.arange(rows)), Prefixes(pool_table(), [0], [0])
        batch = TreeBatch(chain(inputs.tokens), None, torch.arange(rows), prefixes, inputs=inputs)
        runner.forward([batch])
        assert seen.pop() == (number, 3)
        assert torch.get_num_threads() == 3
        seen.clear()


def pool_table():
    return torch.zeros(1, 32, dtype=torch.long)


def test_the_number_returns_after_an_error():
    with pytest.raises(KeyError), threads.threads_for(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 3
