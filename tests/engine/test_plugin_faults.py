"""Plug-ins that break their contract: only their own requests fail, with a clear error."""

import re
from dataclasses import replace

import pytest
import torch

from recserve.core.request import Continuation, Scores, SlateQuery
from recserve.core.strategy import OneRoundStrategy
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.round_scheduler import StrategyError
from recserve.engine.text_scheduler import InvalidPath
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import DrafterError, chain_draft
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.verifiers.registry import verifiers
from recserve.speculation.verifiers.sample import SampleRule
from tests.support.recommenders import CATALOGUES, draw_prefix, make
from tests.support.recorded_steps import Counted, with_graphs
from tests.support.text_engines import assert_no_leak, engine_for, prompts
from tests.support.text_plain import TableDrafter, drawn_model


def run(engine, requests):
    """Returns results, and errors in the place of results."""
    futures = [engine.submit(request) for request in requests]
    for _ in range(400):
        if not engine.step():
            break
    assert all(future.done() for future in futures), "a request waits forever"
    return [future.exception(0) or future.result(0) for future in futures]


class ShortStrategy(OneRoundStrategy):
    """Continues the first search of a request, and forgets the result of the last request."""

    def __init__(self):
        self.started = []

    def results(self, sequences, draft, hidden):
        self.started.append(len(sequences))
        assert all(sequence.pages for sequence in sequences), "a search runs on freed pages"
        results = [
            Scores([], ()) if sequence.chosen else Continuation(sequence.request, [], [])
            for sequence in sequences
        ]
        return results[: len(results) - (len(results) > 1)]


def test_a_strategy_that_returns_too_few_results_fails_alone():
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    engine = build_engine(EngineModels(model), EngineConfig(kv_bytes=4 * 2**20))
    short = ShortStrategy()
    engine.add_strategy("short", short)
    queries = [
        SlateQuery(prefix=draw_prefix(model, 4 + i, i), trie=trie, k=3, beam_width=3)
        for i in range(6)
    ]
    expected = [engine.run(query).rows.tolist() for query in queries]
    mixed = [replace(q, strategy="short") if i % 2 else q for i, q in enumerate(queries)]
    results = run(engine, mixed)
    for number, result in enumerate(results):
        if number % 2:
            assert isinstance(result, StrategyError)
            assert "ShortStrategy returned 2 results for 3 requests" in str(result)
        else:
            assert result.rows.tolist() == expected[number]
    assert short.started == [3], "no continuation of a failed request runs"
    allocator = engine.schedulers["recommender"].kv.allocator
    assert allocator.num_free + allocator.num_idle == allocator.num_pages
    assert isinstance(run(engine, mixed[1:2])[0], Scores) and short.started == [3, 1, 1]


class GreedyForNodes(TableDrafter):
    """Drafts more nodes than its budget for prompts of odd length."""

    def propose(self, contexts, budgets):
        return [
            chain_draft(torch.arange(min(vars(budget).values()) + 2 * (context.num_prompt % 2)))
            for context, budget in zip(contexts, budgets, strict=True)
        ]


class Forgetful(TableDrafter):
    """Returns no draft for the last text of a call with several texts."""

    def propose(self, contexts, budgets):
        drafts = [chain_draft(torch.arange(min(b.num_nodes, b.depth))) for b in budgets]
        return drafts[: len(drafts) - (len(drafts) > 1)]


def texts(drafter, count=4, length=12):
    params = SamplingParams(temperature=0.9, max_tokens=length)
    return [
        TextQuery(prompt[: 3 + i], replace(params, seed=i), Speculation(drafter, num_tokens=3))
        for i, prompt in enumerate(prompts(count, low=9, high=15))
    ]


def plain_of(model, queries):
    engine = engine_for(model)
    plain = [replace(query, speculation=Speculation("none")) for query in queries]
    return [answer.tokens.tolist() for answer in run(engine, plain)]


@pytest.mark.parametrize("load_aware", [False, True])
def test_a_draft_over_its_budget_fails_its_text_alone(load_aware):
    model = drawn_model(1)
    queries = texts("large")
    engine = engine_for(
        model, drafters={"large": GreedyForNodes("none", {})}, load_aware=load_aware
    )
    expected = plain_of(model, queries)
    for query, result, tokens in zip(queries, run(engine, queries), expected, strict=True):
        if len(query.prompt) % 2:
            assert isinstance(result, DrafterError)
            numbers = re.fullmatch(
                r"the drafter 'large' returned a draft of (\d) nodes and (\d) levels; "
                r"the budget was (\d) nodes and (\d) levels",
                str(result),
            )
            nodes, depth, *budget = map(int, numbers.groups())
            # With `load_aware`, the budget depends on the machine.
            assert nodes == depth == min(budget) + 2 and (load_aware or budget == [3, 3])
        else:
            assert result.tokens.tolist() == tokens
    assert_no_leak(engine)


def test_a_drafter_that_returns_too_few_drafts_fails_its_texts_alone():
    model = drawn_model(1)
    engine = engine_for(model, drafters={"short": Forgetful("none", {})})
    queries = [*texts("short", 3), *texts("none")]
    results = run(engine, queries)
    for result in results[:3]:
        assert isinstance(result, DrafterError)
        assert "'short' returned 2 drafts for 3 texts" in str(result)
    assert [result.tokens.tolist() for result in results[3:]] == plain_of(model, queries[3:])
    assert_no_leak(engine)


class Fragile(TableDrafter):
    """Fails to commit once, in the step in which the first text ends."""

    def commit(self, outcomes):
        if self.armed and len(outcomes) == 2:
            self.armed = False
            raise RuntimeError("a broken commit")


class Unforgetting(TableDrafter):
    """Fails to forget any text."""

    def forget(self, sequence):
        raise RuntimeError("a broken forget")


def test_a_result_is_delivered_though_its_step_fails_afterwards():
    model = drawn_model(1)
    drafter = Fragile("none", {})
    drafter.armed = True
    engine = engine_for(model, drafters={"fragile": drafter})
    queries = [*texts("fragile", 1, length=5), *texts("fragile", 3, length=9)[1:]]
    results = run(engine, queries)
    assert not drafter.armed
    assert [result.tokens.tolist() for result in results] == plain_of(model, queries)
    assert_no_leak(engine)


def test_a_drafter_that_forgets_no_text_ends_no_engine():
    model = drawn_model(1)
    engine = engine_for(model, drafters={"d": Unforgetting("none", {})})
    queries = texts("d")
    results = run(engine, queries)
    assert [result.tokens.tolist() for result in results] == plain_of(model, queries)
    assert_no_leak(engine)


class Choosy(SampleRule):
    """A rule for one text, which counts the trees that it sees."""

    name = "choosy"

    def __init__(self):
        self.seen = []

    def verify(self, scored):
        self.seen.append(scored.tree.num_trees)
        return super().verify(scored)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_plug_ins_rule_runs_for_the_texts_that_name_it_alone(graphs, monkeypatch):
    model = drawn_model(1)
    choosy = Choosy()
    monkeypatch.setitem(verifiers(), "choosy", choosy)
    engine = with_graphs(model, Counted(lambda step: step)) if graphs else engine_for(model)
    rules = ("sample", "choosy", "typical", "rejection", "block")
    queries = texts("none", 5)
    queries = [
        replace(query, speculation=replace(query.speculation, verifier=rule))
        for query, rule in zip(queries, rules, strict=True)
    ]
    expected = plain_of(model, queries)
    others = [query for query in queries if query.speculation.verifier != "choosy"]
    assert all(not isinstance(result, Exception) for result in run(engine, others))
    assert choosy.seen == []
    results = run(engine, queries)
    assert results[1].tokens.tolist() == expected[1] and set(choosy.seen) == {1}
    assert all(not isinstance(result, Exception) for result in results)
    if graphs:
        counts = engine.schedulers["text"].graphs.counts
        assert counts["rule"] and counts["replayed"]
    assert_no_leak(engine)


class Wandering(SampleRule):
    """Accepts a wrong number of nodes for its first text."""

    name = "wandering"
    length = 0

    def verify(self, scored):
        accepted = super().verify(scored)
        accepted.lengths[0] = self.length
        return accepted


@pytest.mark.parametrize("length", [-7, -2, -1, 4, 5, 99])
@pytest.mark.parametrize("drafter,right", [("none", 0), ("table", 3)])
def test_a_rule_that_returns_no_path_fails_its_text_alone(drafter, right, length, monkeypatch):
    """Fewer than no nodes, and more than the draft has levels."""
    model, rule = drawn_model(1), Wandering()
    rule.length = length
    monkeypatch.setitem(verifiers(), "wandering", rule)
    queries = texts(drafter, 3)
    expected = plain_of(model, queries)
    known = {
        tuple(query.prompt.tolist()): tokens
        for query, tokens in zip(queries, expected, strict=True)
    }
    engine = engine_for(model, drafters={"table": TableDrafter("right", known)})
    wrong = replace(queries[0], speculation=replace(queries[0].speculation, verifier="wandering"))
    results = run(engine, [wrong, *queries[1:]])
    assert isinstance(results[0], InvalidPath)
    said = f"the acceptance rule 'wandering' returned no path of 0 to {right} nodes of the draft"
    assert str(results[0]) == said
    assert [result.tokens.tolist() for result in results[1:]] == expected[1:]
    assert_no_leak(engine)
