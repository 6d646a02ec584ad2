"""How many machine codes serving asks for: none may be compiled in the middle of it.

Triton compiles anew for every value of a constant, and where a number is 1 or a multiple of 16 or
an address a multiple of 16, unless it is told not to look. Launches are keyed here as it would key
them for an sm_90, without one.
"""

from dataclasses import replace

import pytest
import torch

from recserve.kernels.acceptance import triton_accept, triton_accept_drawn, triton_noise
from recserve.kernels.acceptance.acceptance import DraftProbs, Keys
from recserve.kernels.attention import triton_attention
from recserve.kernels.attention.reference import HeadLayout
from recserve.kernels.attention.triton_attention import TritonTreeAttention
from recserve.kernels.cache import fp8, triton_moves
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.layers import triton_rope_write
from recserve.kernels.linear import triton_head_topk
from recserve.kernels.tree import merge
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.kernels.trie import triton_topk
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.level_search import ChildQuery
from recserve.kernels.trie.trie import BatchFilter, build_trie, pack_leaves
from tests.support import triton_interpreter
from tests.support.attention_batches import draw_tree
from tests.support.device_worlds import text_engine, texts
from tests.support.pretend_cuda import PretendCuda, PretendTensor

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.interpreter import GridExecutor  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

KERNELS = (
    triton_attention._attend, triton_attention._merge, triton_moves.move_kernel,
    triton_rope_write.rope_kernel,
)  # fmt: skip
OTHERS = (
    triton_accept.choose_kernel, triton_accept.walk_kernel, triton_accept_drawn.drawn_walk_kernel,
    triton_accept_drawn.bonus_kernel, triton_accept_drawn.pick_kernel,
    triton_noise.all_tokens_kernel, triton_noise.tokens_kernel, triton_head_topk.head_kernel,
    triton_topk.children_kernel, triton_topk.weights_kernel,
)  # fmt: skip


class Launches:
    """The keys of all launches by kernel, with and without what the kernels tell Triton; and the
    constants, of which no launch can do without a code of its own.
    """

    def __init__(self, kernels=KERNELS):
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.found = {kernel.fn.__name__: set() for kernel in kernels}
        self.eager = {name: set() for name in self.found}
        self.constants = {name: set() for name in self.found}
        self.binders = {
            kernel.fn.__name__: [
                create_function_from_signature(made.signature, made.params, backend)
                for made in (JITFunction(kernel.fn, **kernel.kwargs), JITFunction(kernel.fn))
            ]
            for kernel in kernels
        }

    def add(self, name, arguments, options):
        self.constants[name].add(tuple(options.items()))
        arguments = [x.inner if isinstance(x, PretendTensor) else x for x in arguments]
        for binder, keys in zip(self.binders[name], (self.found, self.eager), strict=True):
            _, specialization, rest = binder(*arguments, **options)
            keys[name].add((*specialization, *rest.items()))


@pytest.fixture
def keys():
    return Launches()


def batches(count, seed=0):
    """What a text lane launches: 1 to 64 texts, drafts of any size, slots that are slices."""
    g = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=g))

    for _ in range(count):
        trees = [draw_tree("tree", number(1, 40), g) for _ in range(number(1, 8) ** 2)]
        tree = merge(trees) if len(trees) > 1 else trees[0]
        own = torch.arange(tree.num_nodes + 16)[number(0, 16) :][: tree.num_nodes]
        lengths = [0 if number(0, 5) == 0 else number(1, 9000) for _ in trees]
        table = torch.zeros(len(trees) + 1, 9216, dtype=torch.int64)
        starts = [9216 * (row + 1) + number(0, 3) for row in range(len(trees))]
        prefixes = Prefixes(table, starts, lengths)
        if fixed := number(0, 3) == 0:
            columns = torch.tensor(starts), torch.tensor(lengths)
            prefixes = Prefixes.on_device(table, *columns, 4096)
        yield TreeBatch(tree, None, own, prefixes, fixed_shapes=fixed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, fp8.FP8], ids=["halves", "fp8"])
def test_attention_over_a_day_of_texts(dtype, keys, monkeypatch):
    """Rows of a block 16 to 128, with parts of a split root and without: eight codes, no more."""
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda self, *a, **o: keys.add(self.fn.__name__, a, o)
    )
    heads, kv_heads, dim = 8, 2, 32
    pool = KVPool(KVShape(2, kv_heads, dim), 400, 16, dtype)
    for number, batch in enumerate(batches(300)):
        query = torch.empty(batch.num_queries, heads, dim, dtype=torch.float16)
        layer = number % 2
        attention = TritonTreeAttention(batch, HeadLayout.of(query, pool.keys[layer]))
        attention(query, query, query, pool.keys[layer], pool.values[layer])
        paths = torch.zeros(batch.tree.num_trees, 1 + number % 17, dtype=torch.int64)
        lengths = torch.zeros(len(paths) + 1, dtype=torch.int64)[number % 2 :][: len(paths)]
        triton_moves.move_paths(pool.keys, pool.values, paths, paths, lengths)
        qkv = torch.empty(len(batch.slots), heads + 2 * kv_heads, dim, dtype=torch.float16)
        turns = torch.empty(len(batch.slots), dim // 2)
        triton_rope_write.rope_write(
            qkv, turns, turns, batch.slots, pool.keys[layer], pool.values[layer]
        )
    counts = {name: len(found) for name, found in keys.found.items()}
    blocks = {4 * 2**n for n in range(4)}
    assert counts.pop("_attend") <= 2 * len(blocks)
    assert counts.pop("_merge") <= 6  # splits 2 to 64, to a power of two
    assert counts == {"move_kernel": 1 if dtype != fp8.FP8 else 2, "rope_kernel": 1}
    assert len(keys.eager["_attend"]) > 2 * len(keys.found["_attend"])
    assert all(len(keys.eager[name]) > n for name, n in counts.items())


def test_attention_of_an_engine(keys, monkeypatch, force_kernels):
    """Prefills and steps of drafted texts on a pretended device: nothing beside the same forms."""
    force_kernels("triton")
    triton_interpreter.interpret_pretended(monkeypatch)
    launch = GridExecutor.__call__

    def keyed(self, *arguments, **options):
        if self.fn.__name__ in keys.found:
            keys.add(self.fn.__name__, arguments, options)
        return launch(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", keyed)
    with PretendCuda():
        text_engine("cuda", ("ngram",)).run_many(
            texts("ngram", "sample", "greedy", count=2, most=4)
        )
    place = triton_attention._attend.arg_names.index("BLOCK_Q")
    blocks = {key[place] for key in keys.found["_attend"]}
    assert len(keys.found["_attend"]) == len(blocks) <= 4  # no root is long enough to be split
    assert len(keys.found["rope_kernel"]) == 1


def slid(tensor, g):
    """The same numbers at another address: 8 bytes or a few behind one that is aligned."""
    before = int(torch.randint(0, 3, (), generator=g))
    return torch.cat([tensor.flatten().new_zeros(before), tensor.flatten()])[before:]


def judged(count, vocabulary):
    """What lanes judge: 1 to 49 trees of any size, of drawn drafts and others, to any depth."""
    g = torch.Generator().manual_seed(1)
    for number in range(count):
        trees = [
            draw_tree("tree", int(torch.randint(1, 20, (), generator=g)), g)
            for _ in range(int(torch.randint(1, 8, (), generator=g)) ** 2)
        ]
        tree = merge(trees) if len(trees) > 1 else trees[0]
        names = ("tokens", "parents", "ends", "depths", "offsets")
        tree = replace(tree, **{name: slid(getattr(tree, name), g) for name in names})
        seeds, lengths = (slid(torch.zeros(len(trees), dtype=torch.int64), g) for _ in "sl")
        logits = torch.empty(tree.num_nodes, vocabulary)
        warmth = slid(torch.ones(len(trees)), g)
        yield logits, tree, Keys(seeds, lengths), warmth, 1 + number % 17, g


@pytest.mark.parametrize("vocabulary", [700, 151_936])
def test_acceptance_noise_and_heads_over_a_day(vocabulary, monkeypatch):
    """One code for each set of constants: nothing that a step is made of has one of its own."""
    keys = Launches(OTHERS)
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda self, *a, **o: keys.add(self.fn.__name__, a, o)
    )
    matrix = torch.empty(1, vocabulary, 16)
    for logits, tree, seeds, warmth, depth, g in judged(60, vocabulary):
        triton_accept.accept(logits, tree, seeds, warmth, depth)
        q = DraftProbs(logits, slid(torch.arange(tree.num_nodes), g))
        triton_accept_drawn.accept_drawn(logits, q, tree, seeds, depth)
        triton_noise.gumbel(seeds.seeds, seeds.prefix_lengths, vocabulary, depth % 4)
        some = slid(torch.zeros(len(warmth), depth * 16 - depth % 3, dtype=torch.int64), g)
        some = some.view(len(warmth), -1)
        triton_noise.gumbel_of_tokens(seeds.seeds, seeds.prefix_lengths, some, depth % 4)
        triton_head_topk.head_topk(torch.zeros(len(warmth), 3, 16), matrix, 4)
    counts = {name: len(found) for name, found in keys.found.items() if found}
    assert counts == {name: len(made) for name, made in keys.constants.items() if made}
    # Shares of the vocabulary, fewer where many nodes are judged; rows of a block 16 to 64.
    assert counts.pop("walk_kernel") <= 2 and counts.pop("head_kernel") <= 3
    assert set(counts.values()) == {1} and len(counts) == 6
    assert len(keys.eager["walk_kernel"]) > 4 and len(keys.eager["tokens_kernel"]) > 4


def test_trie_steps_of_a_day(monkeypatch):
    """Any number of beams and users, every level of two catalogues, versions that grow."""
    keys = Launches(OTHERS)
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda self, *a, **o: keys.add(self.fn.__name__, a, o)
    )
    g = torch.Generator().manual_seed(0)
    for sizes in ((8, 32, 15), (40, 1, 64)):
        ids = [torch.randint(0, size, (500,), generator=g) for size in sizes]
        codes = torch.unique(torch.stack(ids, 1), dim=0)
        base = build_trie(codes[::2], sizes)
        for grown in (1, 7, 100):
            rows = torch.arange(grown) + len(codes[::2])
            live = insert_items(base, codes[1::2][:grown], rows, len(base.leaf_items) + grown)
            for batch, beams in ((1, 1), (2, 7), (3, 16), (16, 10), (1, 64)):
                for trie in (base, live):
                    for level, width in enumerate(trie.widths):
                        step(trie, batch, beams, sizes[level], width, g)
    found, eager = keys.found["children_kernel"], keys.eager["children_kernel"]
    assert len(found) == len(keys.constants["children_kernel"]) < len(eager) / 5


def step(trie, batch, beams, codes, width, g):
    """A level without a filter, with exclusions and with bits of what is allowed."""
    nodes = slid(torch.zeros(batch * beams, dtype=torch.int64), g).view(batch, beams)
    scores = slid(torch.zeros(batch * beams), g).view(batch, beams)
    logits = torch.zeros(batch * beams, codes)
    excluded = slid(torch.zeros(batch * 21, dtype=torch.int32), g).view(batch, 21)
    bits = pack_leaves(torch.ones(batch, trie.base.num_items, dtype=torch.bool))
    for filters in (BatchFilter(), BatchFilter(excluded), BatchFilter(bits=bits)):
        query = ChildQuery(nodes, scores, logits, width, 5, filters=filters)
        triton_topk.best_children(trie, query)
