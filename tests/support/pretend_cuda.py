"""A simulated CUDA device: CPU tensors that report `cuda` and reject what CUDA rejects.

Inside `with PretendCuda() as device`, everything made on or moved to "cuda" is a `PretendTensor`.
Operators compute on the CPU, after the checks that CUDA would make. Tensors must not mix with CPU
tensors, except those without dimensions, and have no `.numpy()`. Every host synchronisation is
recorded with the line that caused it, in three kinds:

    read      .item(), .tolist(), bool(), .cpu()
    shape     an output whose size depends on data: nonzero, x[mask], unique, repeat_interleave, ...
    upload    a copy from the host that is not `non_blocking`: it waits for all work before it

The device can be lost: with `lost_at` set, every operator from that call on fails, and so does
`torch.cuda.synchronize`, as after an illegal memory access.

Synchronisations inside a kernel's torch reference are not recorded, because on a GPU Triton runs
instead. Only calls of torch are simulated: nothing is asynchronous, and nothing is fast.
"""

import functools
import os
import sys
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.paths import ROOT

PACKAGE = str(ROOT / "recserve") + os.sep
ATTENTION = PACKAGE + os.path.join("kernels", "attention", "attention.py")
OPERATORS = PACKAGE + os.path.join("kernels", "backend.py")
CUDA = torch.device("cuda", 0)
STREAM = 7  # handle of the only stream
aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default,
}  # fmt: skip
SHAPES = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default,
}  # fmt: skip
# CUDA's kernels for these operators accept no CPU tensor, not even a scalar one.
STRICT = {
    "cat", "stack", "gather", "scatter", "scatter_add", "index_select", "index_copy", "index_add",
    "mm", "bmm", "addmm", "baddbmm", "linear", "embedding", "searchsorted", "bucketize",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
COPIES = {"copy_", "_to_copy"}
# Composite operators that stay whole, because torch also has one CUDA operator for them.
WHOLE = {"scaled_dot_product_attention", "rms_norm", "layer_norm", "item", "detach_"}


@dataclass(frozen=True)
class Sync:
    """A host synchronisation: its kind, as in the module's docstring, and its place in the code."""

    kind: str
    where: str


class PretendTensor(torch.Tensor):
    """A CPU tensor `inner` on the simulated device.

    To C++ it is on `meta`, the only other device that a CPU build can guard.
    """

    inner: torch.Tensor
    _addresses: set = set()
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        with torch.inference_mode(inner.is_inference()):  # a view has its base's mode
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
                dtype=inner.dtype, device="meta",
            )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on a pretended CUDA tensor outside its `with PretendCuda()`")

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    def __repr__(self):
        return f"Pretend{self.inner!r}"

    @property
    def __cuda_array_interface__(self):
        self._addresses.add(self.inner.data_ptr())
        kinds = {torch.float32: "<f4", torch.int64: "<i8"}
        strides = None if self.inner.is_contiguous() else self.inner.stride()
        return {
            "data": (self.inner.data_ptr(), False), "shape": tuple(self.shape), "strides": strides,
            "typestr": kinds[self.dtype], "version": 2,
        }  # fmt: skip

    @classmethod
    def holds(cls, address):
        """Whether an address was given as that of an array on the device."""
        return address in cls._addresses

    def numpy(self, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use .cpu() first")

    __array__ = numpy

    def tolist(self):
        return self.cpu().tolist()

    def __getitem__(self, index):
        return super().__getitem__(_on_host(index))

    def __setitem__(self, index, value):
        if isinstance(value, (bool, int, float)):  # CUDA tensors also get a number of the host
            value = torch.tensor(value, dtype=self.dtype)
        super().__setitem__(_on_host(index), value)


def _on_host(index):
    """Converts lists to CPU tensors, as torch does."""
    if isinstance(index, list):
        return torch.tensor(index)
    return tuple(map(_on_host, index)) if isinstance(index, tuple) else index


@functools.cache
def decomposes(func):
    """True if an operator consists of others on every device."""
    return func._can_decompose()


class NumberedDevice(TorchFunctionMode):
    """Maps `cuda` to `cuda:0`, which a build without CUDA cannot look up.

    Moving a simulated tensor to the device returns it unchanged.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], CUDA, *args[2:])
        here = CUDA
        if func is torch.Tensor.to and isinstance(args[0], PretendTensor):
            here = torch.device("meta")

        def number(x):
            named = isinstance(x, torch.device) or (isinstance(x, str) and x in ("cuda", "cuda:0"))
            return here if named and torch.device(x).type == "cuda" else x

        return func(*map(number, args), **{name: number(x) for name, x in kwargs.items()})


class PretendCuda(TorchDispatchMode):
    """The simulated device as a context.

    Attributes:
        syncs: The synchronisations so far, in order.
        calls: Number of operators so far.
        lost_at: Number of the first operator that fails. All later ones fail, too.
    """

    def __init__(self):
        super().__init__()
        self.syncs = []
        self.calls, self.lost_at = 0, None
        self._before = None
        self._devices = NumberedDevice()

    def __enter__(self):
        self._before = torch.cuda._lazy_init, torch._C._only_lift_cpu_tensors()
        self._synchronize = torch.cuda.synchronize
        torch.cuda._lazy_init = lambda: None
        self._stream = torch.cuda.current_stream
        torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=STREAM)
        torch.cuda.synchronize = lambda device=None: self._fail_if_lost()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is a `.to`
        self._devices.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        torch.cuda._lazy_init = self._before[0]
        torch.cuda.synchronize = self._synchronize
        torch.cuda.current_stream = self._stream
        torch._C._set_only_lift_cpu_tensors(self._before[1])
        super().__exit__(*error)
        self._devices.__exit__(*error)

    @property
    def lost(self):
        """Whether an operator has failed because the device is lost."""
        return self.lost_at is not None and self.calls > self.lost_at

    def _fail_if_lost(self):
        if self.lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def counts(self):
        """Returns the number of synchronisations by kind."""
        return Counter(sync.kind for sync in self.syncs)

    def table(self):
        """Returns a line per kind and place, most frequent first, to show when a bound fails."""
        lines = Counter((s.kind, s.where) for s in self.syncs).most_common()
        return "\n".join(f"{count:4} {kind:7} {where}" for (kind, where), count in lines)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = _leaves((args, kwargs))
        ours = [x for x in leaves if isinstance(x, PretendTensor)]
        name = func.overloadpacket.__name__
        wanted = next((x for x in leaves if isinstance(x, torch.device)), None)
        asked = wanted is not None and wanted.type in ("cuda", "meta")
        if not ours and not asked:
            if name in ("is_pinned", "pin_memory", "_pin_memory"):
                return False if name == "is_pinned" else args[0].clone()
            return func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"})
        self.calls += 1
        self._fail_if_lost()
        if name not in WHOLE and func is not aten.repeat_interleave.Tensor and decomposes(func):
            with self, torch._C.DisableTorchFunction():
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if ours:
            self._refuse_mixing(func, name, args, leaves)
        self._record(func, name, args, kwargs, asked, bool(ours))
        return self._compute(func, args, kwargs, ours, wanted, asked)

    def _compute(self, func, args, kwargs, ours, wanted, asked):
        known = {id(x.inner): x for x in ours}

        def inner(x):
            return x.inner if isinstance(x, PretendTensor) else x

        options = _mapped(inner, kwargs)
        if asked:
            options["device"] = "cpu"
        options.pop("pin_memory", None)
        here = asked or (bool(ours) and (wanted is None or wanted.type != "cpu"))
        if func is aten.copy_.default:
            here = isinstance(args[0], PretendTensor)
        out = func(*_mapped(inner, args), **options)

        def outer(x):
            if not isinstance(x, torch.Tensor) or not here:
                return x
            return known[id(x)] if id(x) in known else PretendTensor(x)

        return _mapped(outer, out)

    def _refuse_mixing(self, func, name, args, leaves):
        """Rejects CPU tensors together with tensors of the device, as CUDA does."""
        if name in COPIES:
            return
        if name in INDEXING:
            if not isinstance(args[0], PretendTensor):
                raise RuntimeError(
                    "indices should be either on cpu or on the same device as the indexed tensor "
                    "(cpu)"
                )
            indices = {id(x) for x in args[1] if x is not None}
            leaves = [x for x in leaves if id(x) not in indices]
        for x in leaves:
            foreign = isinstance(x, torch.Tensor) and not isinstance(x, PretendTensor)
            if foreign and (x.ndim or name.rstrip("_") in STRICT):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two "
                    f"devices, cuda:0 and cpu! ({func}, a CPU tensor of shape {tuple(x.shape)})"
                )

    def _record(self, func, name, args, kwargs, asked, ours):
        if func in READS or name == "item":
            self._add("read")
        elif func in SHAPES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self._add("shape")
        elif name in INDEXING:
            self._record_indexing(name, args)
        elif name == "_to_copy" and kwargs.get("device") is not None:
            if ours and not asked:
                self._add("read")
            elif asked and not ours and not kwargs.get("non_blocking"):
                self._add("upload")
        elif name == "copy_":
            to_us, from_us = (isinstance(x, PretendTensor) for x in args[:2])
            if from_us and not to_us:
                self._add("read")
            elif to_us and not from_us and not (len(args) > 2 and args[2]):
                self._add("upload")

    def _record_indexing(self, name, args):
        indices = [x for x in args[1] if x is not None]
        masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
        number = "put" in name and args[2].numel() == 1
        if (
            number
            and len(indices) == 1
            and masks == indices
            and isinstance(masks[0], PretendTensor)
        ):
            return  # a masked_fill_
        for x in indices:
            if not isinstance(x, PretendTensor):
                self._add("upload")
            elif x.dtype in (torch.bool, torch.uint8):
                self._add("shape")
        if "put" in name and not isinstance(args[2], PretendTensor):
            self._add("upload")

    def _add(self, kind):
        where, twin = "", False
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            # The reference runs in place of a Triton kernel, where there is one.
            one = frame.f_locals.get("self") if file == OPERATORS else None
            twin = twin or file == ATTENTION or getattr(one, "triton", None) is not None
            ours = file.startswith(str(ROOT)) and "site-packages" not in file
            if not where and ours and file != __file__:
                short = file.removeprefix(PACKAGE).removeprefix(str(ROOT) + os.sep)
                where = f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
            frame = frame.f_back
        if not twin:
            self.syncs.append(Sync(kind, where))


def _leaves(value):
    """Returns all leaves of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for part in value for leaf in _leaves(part)]


def _mapped(change, value):
    """Returns the same lists, tuples and dicts with changed leaves."""
    if isinstance(value, dict):
        return {name: _mapped(change, part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, part) for part in value])
    return change(value)


def looks_of_replays(device, engine, graphs):
    """Returns counts and table of each replayed step of a simulated device, except the last."""
    looks, running = [], True
    while running:
        device.syncs.clear()
        before = graphs.counts["replayed"]
        running = engine.step()
        if graphs.counts["replayed"] > before and running:
            looks.append((device.counts(), device.table()))
    return looks
