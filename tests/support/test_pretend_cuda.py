"""Tests of the simulated CUDA device: it rejects what CUDA rejects and records host waits."""

import numpy as np
import pytest
import torch

from recserve.kernels import backend
from recserve.kernels.cache import moves
from tests.support.pretend_cuda import PretendCuda, PretendTensor


@pytest.fixture(params=[False, True], ids=["gradients", "inference"])
def device(request):
    with PretendCuda() as pretended, torch.inference_mode(request.param):
        yield pretended


def kinds(device):
    found = [sync.kind for sync in device.syncs]
    device.syncs.clear()
    return found


def numbers():
    """Returns [0, 1, 2, 3] on the device, without a synchronisation."""
    return torch.arange(4, device="cuda")


MAKERS = {
    "zeros": lambda: torch.zeros(3, device="cuda"),
    "tensor": lambda: torch.tensor([1, 2], device="cuda:0"),
    "to": lambda: torch.ones(2).to("cuda"),
    "cuda": lambda: torch.ones(2).cuda(),
    "like": lambda: torch.zeros_like(torch.ones(2), device=torch.device("cuda")),
    "new": lambda: numbers().new_full((2,), 7),
    "module": lambda: torch.nn.Linear(2, 3).to("cuda").weight,
}


def test_tensors_live_on_it(device):
    for name, make in MAKERS.items():
        made = make()
        assert isinstance(made, PretendTensor) and made.is_cuda, name
        assert made.device == torch.device("cuda", 0), name
        assert made.to("cuda") is made and made.cpu().device.type == "cpu", name


def test_it_computes_and_views_share_memory(device):
    x = numbers().float()
    x[1:3].mul_(10)
    x[0] = 5
    assert (x @ x).item() == 25 + 100 + 400 + 9
    assert x.view(2, 2).T[1].tolist() == [10, 3]
    assert x.topk(2).values.tolist() == [20, 10]


REFUSED = {
    "add": lambda x: x + torch.ones(4),
    "where": lambda x: torch.where(x > 1, x, torch.ones(4, dtype=torch.int64)),
    "cat": lambda x: torch.cat([x, torch.ones(1, dtype=torch.int64)]),
    "gather": lambda x: x.gather(0, torch.zeros(2, dtype=torch.int64)),
    "index_select": lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int64)),
    "index of a CPU tensor": lambda x: torch.ones(4)[x],
    "values put": lambda x: x.index_put_((x,), torch.ones(4, dtype=torch.int64)),
    "stacked number": lambda x: torch.stack([x[0], torch.tensor(1)]),
}


def test_mixing_is_refused(device):
    for name, mix in REFUSED.items():
        try:
            mix(numbers())
        except RuntimeError as error:
            assert "same device" in str(error) or "searchsorted" in str(error), name
        else:
            pytest.fail(f"{name} was not refused")


def test_numpy_is_refused(device):
    with pytest.raises(TypeError, match="numpy"):
        numbers().numpy()
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(numbers())


def test_numbers_of_the_host_may_join(device):
    x = numbers()
    assert (x + torch.tensor(2)).tolist() == [2, 3, 4, 5]
    assert torch.where(x > 1, x, 0).tolist() == [0, 0, 2, 3]
    assert x.masked_fill(x > 1, 9).tolist() == [0, 1, 9, 9]


SYNCS = {
    "item": (["read"], lambda x: x[1].item()),
    "bool": (["read"], lambda x: bool((x > 1).any())),
    "tolist": (["read"], lambda x: x.tolist()),
    "equal": (["read"], lambda x: torch.equal(x, x)),
    "cpu": (["read"], lambda x: x.cpu()),
    "copied out": (["read"], lambda x: torch.empty(4, dtype=torch.int64).copy_(x)),
    "nonzero": (["shape"], lambda x: (x > 1).nonzero()),
    "mask": (["shape"], lambda x: x[x > 1]),
    "mask put": (["shape"], lambda x: x.index_put_((x > 1,), x[:2].clone())),
    "unique": (["shape"], lambda x: torch.unique(x)),
    "bincount": (["shape"], lambda x: torch.bincount(x)),
    "repeats": (["shape"], lambda x: torch.repeat_interleave(x)),
    "repeated": (["shape"], lambda x: x.repeat_interleave(x)),
    "upload": (["upload"], lambda x: torch.tensor([1], device="cuda")),
    "moved": (["upload"], lambda x: torch.ones(2).to("cuda")),
    "copied in": (["upload"], lambda x: x.copy_(torch.ones(4))),
    "one element": (["upload"], lambda x: x.__setitem__(1, 7)),
    "index of the host": (["upload"], lambda x: x[torch.tensor([1])]),
    "list": (["upload"], lambda x: x[[0, 2]]),
    "async": ([], lambda x: torch.ones(2).to("cuda", non_blocking=True)),
    "slice": ([], lambda x: x[1:3]),
    "filled slice": ([], lambda x: x[1:3].fill_(7)),
    "filled mask": ([], lambda x: x.__setitem__(x > 1, 7)),
    "index": ([], lambda x: x[x]),
    "sized repeats": ([], lambda x: torch.repeat_interleave(x, output_size=6)),
    "repeated often": ([], lambda x: x.repeat_interleave(3)),
    "sorted": ([], lambda x: x.sort()),
}


def test_what_waits_is_recorded(device):
    found = {}
    for name, (_, work) in SYNCS.items():
        x = numbers()
        device.syncs.clear()
        work(x)
        found[name] = kinds(device)
    assert found == {name: expected for name, (expected, _) in SYNCS.items()}


def test_the_line_is_named(device):
    numbers()[1].item()
    assert device.syncs[0].where.startswith("tests/support/test_pretend_cuda.py:")
    assert device.syncs[0].where.endswith("test_the_line_is_named")
    assert device.table().split()[:2] == ["1", "read"]


def test_a_twin_s_own_waiting_is_not_recorded(device, force_kernels):
    """On a GPU the Triton kernel runs instead of the torch reference."""
    force_kernels("torch")
    pool = torch.zeros(2, 1, 5, 1, 2, device="cuda")
    path = numbers()[None, :2]
    length = path.sum(1)
    moves.move_paths(*pool, path + 1, path, length)
    assert kinds(device) == []


def test_an_operator_without_a_triton_kernel_waits_on_a_gpu_too(device, force_kernels):
    force_kernels("torch")
    for triton, expected in ((None, ["read"]), ("kernels:sum", [])):
        operator = backend.Operator(lambda x: x.sum().item(), triton=triton)
        operator(numbers())
        assert kinds(device) == expected


def test_nothing_is_left_behind():
    with PretendCuda():
        x = numbers()
    with pytest.raises(RuntimeError, match="outside"):
        x + 1
    assert torch.tensor([1]).device.type == "cpu"
