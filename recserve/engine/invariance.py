"""The invariant mode: the bits of a result depend on the request alone.

A row of a product has the same bits for any number of rows (kernels/linear/products.py), and
attention sums exactly (kernels/attention/exact.py). Without C, the first is a property of the
machine's library. The mode therefore tests this at start on the served weights, and refuses to
serve where it does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.engine.runner import Runner
from recserve.kernels.attention.exact import ExactPool, exact_attention
from recserve.kernels.tree import TokenTree, chain, from_parents
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.adapters import DecoderAdapter, RankerAdapter
from recserve.models.imported_model import ImportedModel
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.models.packing import PackedLinear, keep_rows_alike
from recserve.models.ranker import NUM_GROUPS, Ranker
from recserve.models.semantic_id_model import SemanticIdModel

Model = LanguageModel | SemanticIdModel | Ranker

NODES = 24
CHUNKS = (1, 2, 5, 17, 45)  # sizes of the chunks of a prefix
OTHER_ROWS = (0, 1, 14, 61, 300)  # rows of another prefix in the same forward pass


class NotInvariant(ValueError):
    """This machine's results for this model depend on the other requests in the batch."""


def invariant_runner(
    adapter: DecoderAdapter | RankerAdapter, num_pages: int, page_size: int, kv_dtype: torch.dtype
) -> Runner:
    """Returns a runner that has passed the test.

    Args:
        adapter: The model's layers.
        num_pages: Pages of the key-value pool.
        page_size: Tokens per page.
        kv_dtype: Element type of the key-value pool.

    Raises:
        NotInvariant: If the test fails. The message says why and what to do.
    """
    model = adapter.model
    name = type(model).__name__
    if adapter.device.type != "cpu":
        raise NotInvariant(
            f"invariant: the {name} is on {adapter.device}, where products depend on the number of "
            "rows; serve it with device cpu"
        )
    items = None
    if not isinstance(model, LanguageModel | Ranker):
        items = model.items
        if not model.config.autoregressive:
            raise NotInvariant(
                f"invariant: this {name} has only level heads, which this mode does not support"
            )
    layers = model.layers if isinstance(model, Ranker) else model.decoder
    if not any(isinstance(module, PackedLinear) for module in layers.modules()):
        raise NotInvariant(
            f"invariant: the weights of the {name} are not packed; call its method pack or "
            "pack_weights, where torch has oneDNN"
        )
    keep_rows_alike(model)
    if isinstance(model, ImportedModel):
        model.pack_outputs()  # a request may name another rule than that of the model
    if items is not None:
        items.one_by_one = True
    slots = 2 * (sum(CHUNKS) + NODES) + max(OTHER_ROWS)
    scratch = ExactPool(adapter.kv_shape, slots, 1, kv_dtype, adapter.device)
    with torch.inference_mode():
        if difference := _Trial(Runner(adapter, scratch, exact_attention), model).difference():
            threads = torch.get_num_threads()
            ways = ["threads 1"] * (threads > 1)
            ways += ["float32"] * (adapter.dtype != torch.float32)
            raise NotInvariant(
                f"invariant: the {name} computes different bits {difference}, with {threads} "
                f"threads and {adapter.dtype}; "
                + (f"try {' or '.join(ways)}" if ways else "serve it without invariant here")
            )
    pool = ExactPool(adapter.kv_shape, num_pages, page_size, kv_dtype, adapter.device)
    return Runner(adapter, pool, exact_attention)


@dataclass(frozen=True)
class _Trial:
    """Computes one prefix and one tree under it, together with different other rows."""

    runner: Runner
    model: Model

    def difference(self) -> str | None:
        """Returns where bits differ, or None if they differ nowhere."""
        draw = torch.Generator().manual_seed(0)
        rows = sum(CHUNKS)
        prefix, nodes = _inputs(self.model, rows, draw), _inputs(self.model, NODES, draw)
        tree = _tree(nodes.tokens, draw)
        places = torch.randperm(self.runner.pool.num_pages, generator=draw)
        near, far, strange = torch.split(places, [rows + NODES, rows + NODES, max(OTHER_ROWS)])
        near = near.sort().values
        states = self._forward(chain(prefix.tokens), prefix, near[:rows], near[:0])
        node_states = self._forward(tree, nodes, near[rows:], near[:rows])
        outputs = self._read(node_states)
        start = 0
        for size, num_others in zip(CHUNKS, OTHER_ROWS, strict=True):
            part = prefix.select(slice(start, start + size))
            others = _inputs(self.model, num_others, draw)
            got = self._forward(
                chain(part.tokens), part, far[start : start + size], far[:start], others, strange
            )
            if not torch.equal(got, states[start : start + size]):
                return f"for {size} rows of a prefix with {num_others} other rows"
            start += size
        got = self._forward(tree, nodes, far[rows:], far[:rows], others, strange)
        if not torch.equal(got, node_states):
            return f"for a tree with {len(others)} other rows"
        path, slots = [NODES - 1], far[rows:]
        while int(tree.parents[path[0]]) >= 0:
            path.insert(0, int(tree.parents[path[0]]))
        for depth, node in enumerate(path):
            one = nodes.select(slice(node, node + 1))
            before = torch.cat([far[:rows], slots[path[:depth]]])
            got = self._forward(chain(one.tokens), one, slots[node : node + 1], before)
            if not torch.equal(got[0], node_states[node]):
                return "for a node by itself"
            if not torch.equal(self._read(got)[0], outputs[node]):
                return "for the outputs of a single state"
        return None

    def _forward(
        self,
        tree: TokenTree,
        inputs: NodeInputs,
        slots: Tensor,
        prefix: Tensor,
        others: NodeInputs | None = None,
        strange: Tensor | None = None,
    ) -> Tensor:
        parts = [_batch(tree, inputs, slots, prefix)]
        if others is not None and strange is not None and len(others):
            place = strange[: len(others)]
            parts.insert(0, _batch(chain(others.tokens), others, place, strange[:0]))
        return self.runner.forward(parts)[-1]

    def _read(self, hidden: Tensor) -> Tensor:
        """Returns [n, ...] with everything that strategies read of hidden states."""
        model = self.model
        if isinstance(model, Ranker):
            return model.heads(hidden)
        if isinstance(model, LanguageModel):
            return model.logits(hidden)
        outputs = [
            model.level_logits(hidden, level) for level in range(len(model.config.codebook_sizes))
        ]
        outputs.append(model.full_logits(hidden))
        items = model.items
        if model.config.dense_head and items is not None and items.num_bound_items:
            outputs.append(items.dense_scores(hidden))
        return torch.cat([part.float() for part in outputs], dim=1)


def _batch(tree: TokenTree, inputs: NodeInputs, slots: Tensor, prefix: Tensor) -> TreeBatch:
    return TreeBatch(tree, None, slots, Prefixes.of([prefix]), inputs=inputs)


def _tree(tokens: Tensor, draw: torch.Generator) -> TokenTree:
    """Returns a random tree whose last node has a parent."""
    parents = [-1]
    for node in range(1, len(tokens)):
        parent = node - 1
        while parent >= 0 and node < len(tokens) - 1 and torch.rand((), generator=draw) < 0.4:
            parent = parents[parent]
        parents.append(parent)
    return from_parents(tokens, torch.tensor(parents))


def _inputs(model: Model, rows: int, draw: torch.Generator) -> NodeInputs:
    """Returns random input rows that the model accepts."""

    def numbers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows,), generator=draw)

    if isinstance(model, LanguageModel):
        return NodeInputs(numbers(0, model.config.vocab_size))
    if isinstance(model, Ranker):
        sizes = model.config
        return NodeInputs(
            numbers(0, model.num_bound_items),
            numbers(0, NUM_GROUPS),
            numbers(0, sizes.num_types),
            numbers(0, sizes.max_positions),
            torch.randn(rows, sizes.dense_size, generator=draw),
        )
    config, items, first_item = model.config, model.items, model.template.first_item
    levels = zip(config.level_offsets, config.codebook_sizes, strict=True)
    stop = max(offset + size for offset, size in levels)
    if items is not None and first_item is not None:
        stop = first_item + items.num_bound_items
    return NodeInputs(numbers(min(config.level_offsets), stop))
