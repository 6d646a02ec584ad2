"""Rows past 2**31 elements in the kernels: addresses without the memory, or with files of holes."""

import pytest
import torch

from recserve.kernels.attention import reference, triton_attention
from recserve.kernels.attention.reference import HeadLayout
from recserve.kernels.attention.triton_attention import TritonTreeAttention
from tests.support import triton_interpreter
from tests.support.attention_batches import draw_batch, split_short_prefixes

HEADS, DIM = 2, 16


@pytest.fixture
def sparse(tmp_path, monkeypatch):
    """Floats in a file that takes no space where nothing is written; kernels see them in place."""

    def made(count):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        tensor = torch.from_file(str(path), shared=True, size=count)
        return tensor, triton_interpreter.Far(tensor, 0, monkeypatch)

    return made


class Changed:
    """A kernel whose arguments another function sets by name before the launch."""

    def __init__(self, kernel, change):
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            by_name = dict(zip(self.kernel.arg_names, arguments, strict=False))
            self.change(by_name)
            return self.kernel[grid](*by_name.values(), **options)

        return launch


def drawn():
    return draw_batch([("tree", 9), ("chain", 3)], [40, 3], HEADS, HEADS, DIM)


def attended(batch, query, keys, values):
    return TritonTreeAttention(batch, HeadLayout.of(query, keys))(query, query, query, keys, values)


def test_queries_and_results_of_attention(monkeypatch):
    """The first computed node is far down the batch; those before it are not there."""
    problem = drawn()
    batch, query, keys, values = problem
    shift = 2**31 // (HEADS * DIM) + 3

    def far(arguments):
        rows = {"query": HEADS * DIM, "out": HEADS * DIM, "lse": HEADS, "query_nodes": 1}
        for name, row in rows.items():
            arguments[name] = triton_interpreter.Far(arguments[name], shift * row, monkeypatch)
        for name in ("block_starts", "query_offsets"):
            arguments[name] = arguments[name] + shift

    monkeypatch.setattr(triton_attention, "_attend", Changed(triton_attention._attend, far))
    expected = reference.tree_attention(query, keys, values, batch)
    torch.testing.assert_close(attended(*problem), expected, rtol=2e-5, atol=5e-6)


def test_parts_of_attention(sparse, monkeypatch):
    """Those of the second part of the prefixes lie behind 2**31 elements of the first."""
    split_short_prefixes(monkeypatch, 16, 2)
    problem = drawn()
    batch, query, keys, values = problem
    rows = 2**31 // DIM + 3
    (parts, far_parts), (lse, far_lse) = sparse(2 * rows * DIM), sparse(2 * rows)

    def far(arguments):
        arguments |= {"out": far_parts, "lse": far_lse, "num_rows": rows}

    def merge(arguments):
        arguments |= {"parts": far_parts, "lse": far_lse, "num_rows": rows}

    monkeypatch.setattr(triton_attention, "_attend", Changed(triton_attention._attend, far))
    monkeypatch.setattr(triton_attention, "_merge", Changed(triton_attention._merge, merge))
    expected = reference.tree_attention(query, keys, values, batch)
    torch.testing.assert_close(attended(*problem), expected, rtol=2e-5, atol=5e-6)
    assert parts[rows * DIM :][: query.numel()].any() and lse[rows:][: len(query) * HEADS].any()


@pytest.mark.parametrize("silu", [False, True])
def test_merged_rows(silu, monkeypatch):
    """One row far down all rows, of one part."""
    parts, lse, out = torch.randn(3, DIM), torch.zeros(3), torch.zeros(3, DIM)
    shift = 2**31 // DIM + 3
    far = [
        triton_interpreter.Far(x, shift * row, monkeypatch)
        for x, row in ((parts, DIM), (lse, 1), (out, DIM))
    ]
    triton_interpreter.start_programs_at(shift, monkeypatch)
    triton_attention._merge[(3,)](
        *far, shift + 3, 1, DIM=DIM, BLOCK_DIM=DIM, BLOCK_S=1, SILU=silu
    )  # fmt: skip
    torch.testing.assert_close(out, parts)


def test_lse_of_merged_parts(sparse, monkeypatch):
    """Three parts, more than 2**31 rows apart: their numbers alone leave 32 bits."""
    rows, size = 2**30 + 3, 2
    (parts, far_parts), (lse, far_lse) = sparse(3 * rows * size), sparse(3 * rows)
    drawn, weights, out = torch.randn(3, 4, size), torch.randn(3, 4), torch.zeros(4, size)
    parts.view(3, rows, size)[:, :4], lse.view(3, rows)[:, :4] = drawn, weights
    triton_attention._merge[(4,)](
        far_parts, far_lse, out, rows, 3, DIM=size, BLOCK_DIM=size, BLOCK_S=4, SILU=False
    )
    torch.testing.assert_close(out, (drawn * weights.softmax(0)[..., None]).sum(0))
