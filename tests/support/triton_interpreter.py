"""Corrections of Triton's interpreter, imported before kernels; skips if Triton is missing.

The interpreter (Triton 3.6) stores bfloat16 as bits in uint16, because NumPy has no such type.
Loads, stores and casts handle this. But `tl.dot` multiplies the bits as integers (results of 1e9),
and a cast from float32 truncates where a GPU rounds to nearest even.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="NO triton on this machine: its kernels were not tested")

from triton.language import core  # noqa: E402
from triton.runtime import interpreter  # noqa: E402


def allow_newer_numpy():
    """Allows NumPy 2.4, which rejects the interpreter's conversion of one-element arrays to int."""
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope=None):
        original(tensor) if scope is None else original(tensor, scope)
        if scope is None:
            tensor.__index__ = lambda self: self.handle.data.item()
        else:
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


allow_newer_numpy()


def teach_bfloat16():
    """Makes products use values instead of bits, and casts round."""
    builder = interpreter.InterpreterBuilder
    cast, dot, handle = builder.cast_impl, builder.create_dot, interpreter.TensorHandle
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32

    def widened(x):
        if x.dtype.scalar != bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), float32)

    def rounded(self, source, target):
        if (source.dtype.scalar, target.scalar) != (float32, bfloat16):
            return cast(self, source, target)
        bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16)
        return handle(bits.numpy(), bfloat16)

    def product(self, a, b, *others):
        return dot(self, widened(a), widened(b), *others)

    builder.create_dot = product
    # Casts between floats have separate names, all for the general cast.
    builder.cast_impl = builder.create_fp_trunc = rounded


teach_bfloat16()


def patch_the_language_once():
    """Patches the language once per launch and module of kernels.

    Triton 3.6 patches it again at every call of a device function from a kernel, which is slow.
    """
    original, patched = interpreter._patch_lang, set()

    class Launch:
        """Ends a launch and removes all patches."""

        def __init__(self, scope):
            self.scope = scope

        def restore(self):
            patched.clear()
            self.scope.restore()

    def patch(fn):
        module = id(fn.__globals__)
        if module in patched:
            return None  # for a device function, whose return value is not used
        scope = original(fn)
        patched.add(module)
        return Launch(scope)

    interpreter._patch_lang = patch


def compute_no_unread_overflows():
    """Skips the overflow check of integer operations.

    The interpreter computes each operation again in 64 bits, for an assertion that only its unused
    option `debug` makes.
    """
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def make_types_once():
    """Caches types, which the interpreter creates several times for each operation.

    Types are values, and each creation also formats a name.
    """
    number_type, shape_type = interpreter._get_np_dtype, core._type_for_tuple_values
    numbers, shapes, blocks = {}, {}, {}

    def get_np_dtype(dtype):
        if dtype.name not in numbers:
            numbers[dtype.name] = number_type(dtype)
        return numbers[dtype.name]

    def type_for_tuple_values(values, fields=None):
        key = tuple([x.value if type(x) is core.constexpr else x for x in values])
        if fields is not None or not all(type(x) is int for x in key):
            return shape_type(values, fields)
        if key not in shapes:
            shapes[key] = shape_type(values)
        return shapes[key]

    def block(element_type, shape):
        """Returns a block type; `shape` comes from another block type, so it is valid."""
        space = getattr(element_type, "address_space", None)
        key = (element_type.name, space, *shape.values)
        if key not in blocks:
            blocks[key] = core.block_type(element_type, shape)
        return blocks[key]

    interpreter._get_np_dtype = get_np_dtype
    core._type_for_tuple_values = type_for_tuple_values
    core.block_type.with_element_ty = lambda self, element_type: block(element_type, self.shape)
    interpreter.InterpreterBuilder.get_block_ty = lambda self, *of: block(*of)


patch_the_language_once()
compute_no_unread_overflows()
make_types_once()


class Far:
    """A tensor that a kernel sees with its base `elements` before the data.

    This tests far addresses without the memory. Kernels with such a tensor are interpreted in
    place, without copies in or out.
    """

    def __init__(self, tensor, elements, monkeypatch):
        self.tensor, self.dtype, self.device = tensor, tensor.dtype, tensor.device
        self.shape, self.elements = tensor.shape, elements
        executor = interpreter.GridExecutor
        monkeypatch.setattr(executor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
        monkeypatch.setattr(executor, "_restore_args_dev", lambda self, *arguments: None)

    def data_ptr(self):
        return self.tensor.data_ptr() - self.elements * self.tensor.element_size()


def start_programs_at(first, monkeypatch):
    """Numbers the programs of a launch from `first` on along the first axis.

    Rows that follow from a program's number then have far addresses, without a launch of that size.
    """

    def set_grid_idx(self, x, y, z):
        self.grid_idx = (x + first, y, z)

    monkeypatch.setattr(type(interpreter.interpreter_builder), "set_grid_idx", set_grid_idx)


def interpret_pretended(monkeypatch):
    """Interprets kernels on the CPU tensors inside the tensors of pretend_cuda.py.

    Returns:
        The number of launches so far, by kernel.
    """
    launch, launches = interpreter.GridExecutor.__call__, Counter()

    def unwrapped(self, *arguments, **options):
        launches[self.fn.__name__] += 1
        plain = [getattr(x, "inner", x) for x in arguments]
        return launch(self, *plain, **{k: getattr(x, "inner", x) for k, x in options.items()})

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unwrapped)
    return launches
