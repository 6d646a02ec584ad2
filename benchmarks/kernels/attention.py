"""Tree attention and its alternatives on the same trees, as functions to time and compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from recserve.kernels.attention.attention import tree_attention
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.cache.fp8 import Fp8
from recserve.kernels.tree import TokenTree, chain, from_parents, merge, root_branch
from recserve.kernels.tree_batch import Prefixes, TreeBatch


@dataclass(frozen=True)
class Shape:
    """B equal trees of N nodes over prefixes of R tokens.

    `kind` is `tree` (a random draft of depth 8 at most), `branches` (isolated nodes, one per
    candidate) or `chain` (a prefill).
    """

    kind: str
    batch: int
    prefix: int
    nodes: int
    heads: int
    kv_heads: int
    dim: int

    def name(self) -> str:
        heads = f"H{self.heads}/{self.kv_heads}-D{self.dim}"
        return f"{self.kind} B{self.batch} R{self.prefix} N{self.nodes} {heads}"


@dataclass(frozen=True)
class Problem:
    """Inputs of one layer.

    Keys and values of a prefix and its tree are adjacent in the pool, so that the alternatives need
    not gather them.
    """

    shape: Shape
    batch: TreeBatch
    query: Tensor
    keys: Tensor
    values: Tensor

    def bytes(self) -> int:
        """Returns the fewest bytes to move: every key and value once, queries in, results out."""
        s, size = self.shape, self.query.element_size()
        tokens = 2 * s.batch * (s.prefix + s.nodes) * s.kv_heads
        return (tokens + 2 * s.batch * s.nodes * s.heads) * s.dim * size

    def operations(self) -> int:
        """Returns the operations of two products over the keys that each node sees."""
        s, tree = self.shape, self.batch.tree
        seen = s.prefix * s.batch * s.nodes + int((tree.depths + 1).sum())
        return 4 * seen * s.heads * s.dim


def draw_tree(kind: str, nodes: int, generator: torch.Generator) -> TokenTree:
    """Returns one random tree; the nodes of a draft have depth 8 at most."""
    tokens = torch.zeros(nodes, dtype=torch.int64)
    if kind == "branches":
        return root_branch(tokens, torch.arange(nodes + 1))
    if kind == "chain":
        return chain(tokens)
    path: list[int] = []
    parents = []
    for i in range(nodes):
        keep = int(torch.randint(0, min(len(path), 7) + 1, (), generator=generator))
        path = path[: max(keep, min(len(path), 7) - 1) if i % 3 else keep]
        parents.append(path[-1] if path else -1)
        path.append(i)
    return from_parents(tokens, torch.tensor(parents))


def draw(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """Returns random inputs.

    Every prefix and tree has its own slots, in a pool that is slightly larger.
    """
    g = torch.Generator().manual_seed(seed)
    tree = merge([draw_tree(shape.kind, shape.nodes, g) for _ in range(shape.batch)]).to(device)
    size = shape.prefix + shape.nodes
    slots = torch.arange(shape.batch * size, device=device).view(shape.batch, size) + 16
    batch = TreeBatch(
        tree, None, slots[:, shape.prefix :].flatten(), Prefixes.of(list(slots[:, : shape.prefix]))
    )
    g = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=g, device=device).to(dtype)

    pool = shape.batch * size + 32
    return Problem(
        shape,
        batch,
        normal(tree.num_nodes, shape.heads, shape.dim),
        normal(pool, shape.kv_heads, shape.dim),
        normal(pool, shape.kv_heads, shape.dim),
    )


def ours(problem: Problem, activation: Activation = SOFTMAX) -> Callable[[], Tensor]:
    """Returns this project's attention, planned once, as for the many layers of a forward pass."""
    heads = HeadLayout.of(problem.query, problem.keys)
    attention = tree_attention(problem.batch, heads, activation)
    slots = problem.batch.slots
    key, value = problem.keys[slots], problem.values[slots]
    return lambda: attention(problem.query, key, value, problem.keys, problem.values)


def ours_fp8(problem: Problem, activation: Activation = SOFTMAX) -> Callable[[], Tensor]:
    """Returns the same attention with 8-bit keys and values."""
    keys, values = Fp8.of(problem.keys), Fp8.of(problem.values)
    query = problem.query
    attend = tree_attention(problem.batch, HeadLayout.of(query, keys), activation)
    return lambda: attend(query, query, query, keys, values)


def _side_by_side(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    s = problem.shape
    query = problem.query.view(s.batch, s.nodes, s.heads, s.dim).transpose(1, 2)
    size = s.batch * (s.prefix + s.nodes)
    key, value = (
        pool[16 : 16 + size].view(s.batch, s.prefix + s.nodes, s.kv_heads, s.dim).transpose(1, 2)
        for pool in (problem.keys, problem.values)
    )
    return query, key, value


def dense_mask(problem: Problem) -> Tensor:
    """Returns the [B, 1, N, R + N] bool mask."""
    s, tree = problem.shape, problem.batch.tree
    index = torch.arange(s.nodes, device=problem.query.device)
    ends = tree.ends.view(s.batch, s.nodes) - tree.offsets[:-1, None]
    seen = (index[None, None] <= index[None, :, None]) & (index[None, :, None] < ends[:, None])
    prefix = torch.ones(s.batch, s.nodes, s.prefix, dtype=torch.bool, device=seen.device)
    return torch.cat([prefix, seen], dim=2)[:, None]


def sdpa(problem: Problem) -> Callable[[], Tensor]:
    """Returns torch's scaled_dot_product_attention with a precomputed dense mask."""
    query, key, value = _side_by_side(problem)
    mask = dense_mask(problem)
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~mask, float("-inf"))
    grouped = problem.shape.heads != problem.shape.kv_heads

    def call() -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(problem.query.shape)

    return call


def flex(problem: Problem) -> Callable[[], Tensor]:
    """Returns torch's compiled FlexAttention with a precomputed block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = _side_by_side(problem)
    s, tree = problem.shape, problem.batch.tree
    ends = (tree.ends.view(s.batch, s.nodes) - tree.offsets[:-1, None]).int()
    prefix = s.prefix

    def sees(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        node = j - prefix
        inside = (node <= i) & (i < ends[b, node.clamp(min=0)])
        return (j < prefix) | inside

    device = str(problem.query.device)
    torch._dynamo.reset()  # compile for this shape, past the limit on variants of a function
    mask = create_block_mask(sees, s.batch, None, s.nodes, s.prefix + s.nodes, device)
    compiled = torch.compile(flex_attention)
    grouped = s.heads != s.kv_heads

    def call() -> Tensor:
        out = compiled(query, key, value, block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(problem.query.shape)

    return call


def flash(problem: Problem) -> Callable[[], Tensor]:
    """Returns the flash and cuDNN kernels of torch.

    They have no tree mask, so every node sees the whole prefix and all nodes. They move the same
    bytes but compute another result, so only their time is meaningful. For chains without a prefix
    they are causal, and the result is the same.
    """
    query, key, value = _side_by_side(problem)
    grouped, causal = query.shape[1] != key.shape[1], query.shape[2] == key.shape[2]
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]

    def call() -> Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=grouped
            )

    return call
