"""Sampling parameters on every node: a plain loop, transformers, and no neighbours."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.text_trees import TreePacker
from recserve.kernels.acceptance.acceptance import largest
from recserve.kernels.acceptance.noise import gumbel
from recserve.models.loading import load_language_model
from recserve.speculation import sampling
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import Budget
from recserve.speculation.drafter import TextContext
from recserve.speculation.logits_processor import LogitsProcessor, TextColumns, TokenCounts
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.sampling_table import sampling_table
from recserve.speculation.verifier import ScoredTrees
from recserve.speculation.verifiers.registry import verify
from recserve.speculation.verifiers.sample import draw_tokens
from tests.support.text_plain import VOCABULARY, TableDrafter, processed


def drawn_params(random: np.random.Generator) -> SamplingParams:
    """Each parameter is at work in about half of the sequences."""

    def perhaps(value, neutral):
        return value if random.random() < 0.5 else neutral

    def words():
        return tuple(
            tuple(int(t) for t in random.integers(0, 6, random.integers(1, 4))) for _ in range(6)
        )

    return SamplingParams(
        temperature=perhaps(float(random.uniform(0.3, 2)), 1.0) if random.random() < 0.8 else 0.0,
        top_k=perhaps(int(random.integers(1, 50)), 0),
        top_p=perhaps(float(random.uniform(0, 1)), 1.0),
        min_p=perhaps(float(random.uniform(0, 0.3)), 0.0),
        repetition_penalty=perhaps(float(random.uniform(0.7, 1.8)), 1.0),
        presence_penalty=perhaps(float(random.uniform(-1, 1)), 0.0),
        frequency_penalty=perhaps(float(random.uniform(-1, 1)), 0.0),
        logit_bias=perhaps({int(random.integers(VOCABULARY)): 3.0, 5: -2.0}, {}),
        bad_words=perhaps(words(), ()),
        stop_token_ids=(1, 4),
        max_tokens=40,
        min_tokens=perhaps(6, 0),
        seed=int(random.integers(1000)),
    )


def drawn_case(seed: int, batch: int, device="cpu"):
    """Contexts over a few tokens, so that words and counts repeat, and drawn trees below them."""
    random = np.random.default_rng(seed)
    contexts, drafts = [], []
    for number in range(batch):
        tokens = random.integers(0, 6, random.integers(2, 12)).tolist()
        num_prompt = int(random.integers(1, len(tokens)))
        contexts.append(
            TextContext(number, tokens, num_prompt, drawn_params(random), Speculation())
        )
    drafter = TableDrafter("tree", {})
    drafter.random = random
    for _ in contexts:
        text = random.integers(0, 6, 40).tolist()
        drafts.append(drafter._tree(text, Budget(12, 6), auxiliary=False))
    tree = TreePacker(device)([c.tokens[-1] for c in contexts], drafts)
    logits = torch.from_numpy(random.normal(0, 3, (tree.num_nodes, VOCABULARY))).float()
    return contexts, drafts, tree, logits


def target_of(contexts, drafts, tree, logits):
    counts = None
    if any(context.params.counts_tokens for context in contexts):
        counts = TokenCounts(len(contexts) + 1, VOCABULARY, logits.device)
    for row, context in enumerate(contexts, 1):
        context.row = row
        if context.params.counts_tokens:
            counts.start(row, context)
    table = sampling_table([c.params for c in contexts], logits.device)
    depth = max(d.depth for d in drafts)
    return LogitsProcessor(
        logits, tree, depth, table, TextColumns.of(contexts, table).past(table, counts)
    )


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_node_equals_a_plain_loop(seed, batch):
    contexts, drafts, tree, logits = drawn_case(seed * 10 + batch, batch)
    target = target_of(contexts, drafts, tree, logits)
    nodes = torch.randperm(tree.num_nodes, generator=torch.Generator().manual_seed(seed))
    rows = target(nodes)
    owners = tree.tree_ids().tolist()
    for row, node in zip(rows, nodes.tolist(), strict=True):
        context = contexts[owners[node]]
        path, at = [], node
        while int(tree.parents[at]) >= 0:
            path.insert(0, int(tree.tokens[at]))
            at = int(tree.parents[at])
        tokens = context.tokens + path
        expected = torch.tensor(processed(logits[node], tokens, context.num_prompt, context.params))
        if context.params.greedy:
            assert int(row.argmax()) == int(expected.argmax())
            if not target.table.greedy:
                assert int((row > sampling.BANNED).sum()) == 1
            continue
        torch.testing.assert_close(row, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_change_no_bit(seed):
    """A sequence alone has the same rows as in the batch."""
    contexts, drafts, tree, logits = drawn_case(seed, 6)
    together = target_of(contexts, drafts, tree, logits)(torch.arange(tree.num_nodes))
    for number, (context, draft) in enumerate(zip(contexts, drafts, strict=True)):
        own = slice(int(tree.offsets[number]), int(tree.offsets[number + 1]))
        small = TreePacker("cpu")([context.tokens[-1]], [draft])
        target = target_of([context], [draft], small, logits[own])
        alone = target(torch.arange(small.num_nodes))
        if target.table.greedy:
            assert torch.equal(alone.argmax(1), together[own].argmax(1))
        else:
            assert torch.equal(alone, together[own])


@pytest.mark.parametrize("batch", [1, 8])
def test_shapes_that_depend_on_no_value_change_no_bit(batch):
    """Drawing at every node, without a question to the device, gives the lazy walk's path."""
    kept = 0
    for seed in range(12):
        contexts, drafts, tree, logits = drawn_case(seed, batch)
        target = target_of(contexts, drafts, tree, logits)
        fixed = replace(target, fixed_shapes=True)
        nodes = torch.arange(tree.num_nodes)
        assert torch.equal(target(nodes), fixed(nodes))
        lazy = ScoredTrees(
            tree,
            target.depth,
            target,
            target.table.seeds,
            torch.tensor([len(c.tokens) for c in contexts]),
            VOCABULARY,
        )
        everywhere = replace(lazy, target=fixed, fixed_shapes=True)
        wanted, found = verify("sample", lazy), verify("sample", everywhere)
        for name in ("nodes", "lengths", "bonus"):
            assert torch.equal(getattr(wanted, name), getattr(found, name))
        kept += int(found.lengths.sum())
    assert kept > 0 or batch == 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_temperature_alone_needs_no_target(temperature):
    """Greedy or not, the raw logits and the temperatures are enough."""
    contexts, drafts, tree, logits = drawn_case(5, 8)
    contexts = [
        replace(c, params=SamplingParams(temperature=temperature, seed=i))
        for i, c in enumerate(contexts)
    ]
    target = target_of(contexts, drafts, tree, logits)
    lengths = torch.tensor([len(c.tokens) for c in contexts])
    one = ScoredTrees(tree, target.depth, target, target.table.seeds, lengths, VOCABULARY)
    one = replace(one, greedy=temperature == 0)
    other = replace(one, logits=logits, temperatures=target.table.temperature)
    wanted = verify("sample", one)
    for scored in (other, replace(other, fixed_shapes=True, greedy=False)):
        found = verify("sample", scored)
        assert torch.equal(wanted.nodes, found.nodes) and torch.equal(wanted.bonus, found.bonus)


def test_a_drawn_case_has_every_parameter():
    """The comparison above would prove little if the words were never met."""
    contexts, drafts, tree, logits = drawn_case(13, 8)
    rows = target_of(contexts, drafts, tree, logits)(torch.arange(tree.num_nodes))
    banned = (rows == sampling.BANNED).sum(1)
    assert int(banned.max()) > 10 and int(banned.min()) < VOCABULARY - 1
    table = sampling_table([c.params for c in contexts])
    assert table.bias is not None and table.bad_words is not None and table.stops is not None


@pytest.mark.parametrize("seed", range(3))
def test_truncations_equal_transformers(seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 500, generator=g) * 4
    tokens = torch.zeros(7, 1, dtype=torch.int64)
    off = {"top_k": torch.zeros(7, dtype=torch.int64), "top_p": torch.ones(7)}
    off["min_p"] = torch.zeros(7)
    for k in (1, 3, 499, 500, 900):
        ours = sampling.truncate(logits, **off | {"top_k": torch.full((7,), k)})
        assert torch.equal(ours, TopKLogitsWarper(k)(tokens, logits))
    for p in (0.05, 0.5, 0.9, 0.999):
        ours = sampling.truncate(logits, **off | {"top_p": torch.full((7,), p)})
        assert torch.equal(ours, TopPLogitsWarper(p)(tokens, logits))
    for p in (0.001, 0.1, 1.0):
        ours = sampling.truncate(logits, **off | {"min_p": torch.full((7,), p)})
        assert torch.equal(ours, MinPLogitsWarper(p)(tokens, logits))


def test_a_flat_distribution_goes_past_the_head():
    """A nucleus wider than what is looked at first; ties with the last kept token stay."""
    logits = torch.linspace(0, 1e-3, 5000)[None]
    one = {"top_k": torch.zeros(1, dtype=torch.int64), "min_p": torch.zeros(1)}
    ours = sampling.truncate(logits, top_p=torch.tensor([0.7]), **one)
    assert int((ours > sampling.BANNED).sum()) == pytest.approx(3500, abs=2)
    tied = torch.tensor([[2.0, 2.0, 2.0, 1.0]])
    one["top_k"] = torch.tensor([2])
    kept = sampling.truncate(tied, top_p=torch.ones(1), **one)
    assert (kept > sampling.BANNED).tolist() == [[True, True, True, False]]


def test_penalties_and_words_equal_transformers():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    tokens = [3, 9, 4, 4, 9]
    words = ((4, 9, 1), (9, 2), (7,), (3, 9))
    for params, theirs in (
        (SamplingParams(repetition_penalty=1.6), RepetitionPenaltyLogitsProcessor(1.6)),
        (SamplingParams(bad_words=words), NoBadWordsLogitsProcessor([list(w) for w in words], 0)),
    ):
        context = TextContext(0, tokens, 2, params, Speculation())
        tree = TreePacker("cpu")([9], [TableDrafter("none", {})._one(context, Budget(0, 0))])
        counts = TokenCounts(1, VOCABULARY, "cpu")
        counts.start(0, context)
        table = sampling_table([params])
        target = LogitsProcessor(
            logits, tree, 0, table, TextColumns.of([context], table).past(table, counts)
        )
        expected = theirs(torch.tensor([tokens]), logits.clone())
        torch.testing.assert_close(target(torch.tensor([0])), expected)


def test_greedy_text_equals_transformers(tmp_path):
    """Token for token, drafted and not, on a drawn model of another library."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
        pad_token_id=0,
    )
    theirs = LlamaForCausalLM(config).eval()
    for weight in theirs.parameters():
        weight.data.add_(torch.randn(weight.shape) * 0.3)
    theirs.save_pretrained(tmp_path)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCABULARY, n) for n in (1, 5, 12, 30)]
    texts, requests = {}, []
    params = SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.2)
    for prompt in prompts:
        tokens = torch.from_numpy(prompt)[None]
        out = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=20,
            do_sample=False,
            repetition_penalty=1.2,
        )
        texts[tuple(prompt.tolist())] = out[0, len(prompt) :].tolist()
        requests.append(TextQuery(prompt, params, Speculation("table")))
    for kind in ("none", "right", "mixed"):
        engine = build_engine(
            EngineModels(
                text=load_language_model(tmp_path), drafters={"table": TableDrafter(kind, texts)}
            ),
            EngineConfig(kv_bytes=2**20, load_aware=False),
        )
        answers = engine.run_many(requests)
        assert [a.tokens.tolist() for a in answers] == list(texts.values())


@pytest.mark.parametrize("vocabulary", [7, 1000, 5003])
def test_few_possible_tokens_are_drawn_as_all_are(vocabulary):
    """Looking noise up token by token changes no draw."""
    g = torch.Generator().manual_seed(vocabulary)
    seeds = torch.randint(0, 2**40, (50,), generator=g)
    positions = torch.randint(0, 10_000, (50,), generator=g)
    logits = torch.randn(50, vocabulary, generator=g) * 2
    for kept in (1, 2, vocabulary // 10 + 1, vocabulary):
        cut = sampling.truncate(logits, torch.full((50,), kept), torch.ones(50), torch.zeros(50))
        expected = (cut + gumbel(seeds, positions, vocabulary)).argmax(1)
        assert torch.equal(draw_tokens(cut, seeds, positions), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 255, 512, 5003])
def test_largest_is_argmax(size, dtype):
    """Ties, rows of -inf, zeros of either sign, all negative; rows that are not contiguous."""
    g = torch.Generator().manual_seed(size)
    rows = torch.randint(0, 4, (40, size), generator=g).to(dtype)
    rows[::5] = float("-inf")
    rows[1::5] = torch.randn(8, size, generator=g).to(dtype)
    rows[2::5, -1] = 9.0
    rows[3::5] = -rows[3::5]
    rows[4::5] = torch.where(torch.rand(8, size, generator=g) < 0.5, 0.0, -0.0).to(dtype)
    kinds = (rows[kind::5] for kind in range(5))
    for own in (rows, *kinds, rows[::3, size // 2 :], rows.t().contiguous().t()):
        assert torch.equal(largest(own), own.argmax(-1))


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_counts_tokens(name):
    assert not SamplingParams().counts_tokens
    for value in (-1.0, 0.5, 2.0)[name == "repetition_penalty" :]:
        assert SamplingParams(**{name: value}).counts_tokens


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("temperature", 0.0, 100.0),
        ("top_k", 0, None),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.01, 100.0),
        ("presence_penalty", -100.0, 100.0),
        ("frequency_penalty", -100.0, 100.0),
        ("logit_bias", -1e9, 1e9),
        ("max_tokens", 1, None),
        ("min_tokens", 0, 16),
        ("logprobs", 0, None),
        ("seed", -(2**63), 2**63 - 1),
    ],
)
def test_a_parameter_may_have_both_ends_of_its_range_and_nothing_beyond(name, low, high):
    for end, sign in ((low, -1), (high, 1)):
        if end is None:
            continue
        beyond = end + sign if isinstance(end, int) else math.nextafter(end, sign * math.inf)
        for value, allowed in ((end, True), (beyond, False)):
            given = {name: {7: value} if name == "logit_bias" else value}
            if allowed:
                assert getattr(SamplingParams(**given), name) == given[name]
                continue
            with pytest.raises(ValueError, match=f"{name}: expected (int|float) "):
                SamplingParams(**given)


@pytest.mark.parametrize("truncate", [sampling.truncate, sampling.truncate_fixed])
def test_what_does_not_truncate_bans_nothing(truncate):
    """Not even tokens whose probability is lost in rounding, beside rows that are truncated."""
    logits = torch.tensor([[0.0, -20.0, -100.0, -21.0]]).repeat(4, 1)
    top_k, top_p = torch.tensor([0, 2, 0, 0]), torch.tensor([1.0, 1.0, 0.5, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1])
    allowed = truncate(logits, top_k, top_p, min_p) > sampling.BANNED
    assert allowed.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
