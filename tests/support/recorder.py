"""CUDA graphs simulated on a CPU: the operations of one run, replayed on the same addresses.

Every output is written to the memory of the first run, whatever the data are now. An operation that
reads a number from the device, or whose shape depends on data, raises during the capture.
"""

import functools
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recserve.engine.capture import EagerRecorder
from recserve.kernels import backend

ASKS = (
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero", "equal",
    "lift_fresh",
)  # fmt: skip
HOST = ("tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")


class AsksTheDevice(BaseException):
    """Raised for a step that cannot be captured.

    It is no Exception, because an engine handles those and continues.
    """


def tensors(value):
    """Returns the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        return []
    return [leaf for part in value for leaf in tensors(part)]


@functools.cache
def asks_by_name(func):
    """True if an operation of this name always reads a number from the device."""
    name = func._schema.name.split("::")[1].lstrip("_")
    return any(name.startswith(word.lstrip("_")) for word in ASKS)


@functools.cache
def returns_views(func):
    """True if an operation says that all its outputs are views, and writes to none of them."""
    names = [value.alias_info for value in func._schema.returns]
    return bool(names) and not any(name is None or name.is_write for name in names)


def is_view(func, arguments, out):
    """True if an operation only creates views of its arguments, which a replay finds unchanged.

    An operation such as `reshape` may copy instead, so its outputs are checked.
    """
    if not returns_views(func):
        return False
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors(arguments)}
    return all(made.untyped_storage().data_ptr() in given for made in out)


class Recording(TorchDispatchMode):
    """Records operations in order, without views, with their inputs and outputs."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        asks = asks_by_name(func)
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
    """Runs a step and returns its replay."""

    def refuse(name):
        def refused(*_, **__):
            raise AsksTheDevice(name)

        return refused

    step()
    patches = [mock.patch.object(torch.Tensor, name, refuse(name)) for name in HOST]
    # C kernels are no torch operations, so a replay would miss them.
    patches.append(mock.patch.object(backend, "FORCED", "torch"))
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


class CpuRecorder(EagerRecorder):
    """Captures with a function: by default on the CPU, as above."""

    def __init__(self, capture=record):
        super().__init__()
        self.capture = capture

    def __call__(self, step):
        return self.capture(step)
