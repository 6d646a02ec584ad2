"""What a CUDA graph does, on a CPU: the operations of one run, replayed on the same addresses.

Every output is written where the first run left it, whatever the data are now. An operation that
asks the device for a number, or whose shape depends on one, cannot be recorded and raises.
"""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recserve.kernels import dispatch

ASKS = (
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero", "equal",
    "lift_fresh",
)  # fmt: skip
HOST = ("tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")


class AsksTheDevice(BaseException):
    """A step that could not be recorded. No Exception: behind those an engine goes on."""


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_view(func, arguments, out):
    """Whether an operation only named memory of its arguments anew: a replay finds the names where
    they were left. One like `reshape` may copy instead, so its outputs are looked at.
    """
    names = [value.alias_info for value in func._schema.returns]
    if not names or any(name is None or name.is_write for name in names):
        return False
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors(arguments)}
    return all(made.untyped_storage().data_ptr() in given for made in out)


class Recording(TorchDispatchMode):
    """Operations in order, but for views: with what they read and where they wrote."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        asks = any(name.lstrip("_").startswith(word.lstrip("_")) for word in ASKS)
        if name == "repeat_interleave":
            repeats = func._overloadname != "self_int"
            asks = repeats and kwargs.get("output_size") is None
        if name in ("index", "index_put", "index_put_"):
            asks = any(t.dtype == torch.bool for t in tensors(args[1]))
        if asks:
            raise AsksTheDevice(name)
        out = func(*args, **kwargs)
        left = tensors(out)
        if not is_view(func, (args, kwargs), left):
            self.operations.append((func, args, kwargs, left))
        return out


def record(step):
    """The replay of a step."""

    def refuse(name):
        def refused(*_, **__):
            raise AsksTheDevice(name)

        return refused

    step()
    patches = [mock.patch.object(torch.Tensor, name, refuse(name)) for name in HOST]
    # What runs in C is no operation of torch: it would not be replayed.
    patches.append(mock.patch.object(dispatch, "KERNELS", "torch"))
    recording = Recording()
    for patch in patches:
        patch.start()
    try:
        with recording:
            outputs = step()
    finally:
        for patch in patches:
            patch.stop()

    def replay():
        for func, args, kwargs, left in recording.operations:
            for kept, new in zip(left, tensors(func(*args, **kwargs)), strict=True):
                if kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)
        return outputs

    return replay
