"""Imported before kernels: skips where Triton is missing, and mends its interpreter."""

import pytest

pytest.importorskip("triton", reason="NO triton on this machine: its kernels were not tested")

from triton.runtime import interpreter  # noqa: E402


def allow_newer_numpy():
    """Triton 3.6's interpreter turns one-element arrays into ints, which NumPy 2.4 refuses."""
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope=None):
        original(tensor) if scope is None else original(tensor, scope)
        if scope is None:
            tensor.__index__ = lambda self: self.handle.data.item()
        else:
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


allow_newer_numpy()
