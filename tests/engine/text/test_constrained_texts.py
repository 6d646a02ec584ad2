"""Constrained texts: the same with any draft, in any batch, at any temperature, and valid."""

import json
from dataclasses import replace

import jsonschema_rs
import numpy as np
import pytest

from recserve.core.constraint import Grammar, NoTokenLeft
from recserve.drafters.none import NoDrafter
from recserve.engine import text_scheduler
from recserve.speculation.sampling_params import Speculation
from tests.support.constrained_texts import (
    GRAMMARS,
    drawn_query,
    drawn_schema,
    plain_constrained,
    read,
    schema,
)
from tests.support.recorded_steps import SHAPES, Counted, with_graphs
from tests.support.text_engines import MAKERS, assert_no_leak, engine_for, shared_model

UNDRAFTED = Speculation("none", num_tokens=0)
EVERY = {"none": lambda m: NoDrafter()} | MAKERS


def results(engine, queries):
    """Returns the completion or the error of each request, all of them together.

    An error has the tokens before it as its attribute `tokens`.
    """
    written = [[] for _ in queries]
    listening = [
        replace(query, on_commit=lambda commit, own=own: own.extend(commit.tokens))
        for query, own in zip(queries, written, strict=True)
    ]
    futures = [engine.submit(query) for query in listening]
    while engine.step():
        pass
    found = [future.exception(0) or future.result(0) for future in futures]
    for one, own in zip(found, written, strict=True):
        if isinstance(one, Exception):
            one.tokens = np.array(own)
    return found


def outcome(result):
    """Returns what a text may not differ in."""
    if isinstance(result, Exception):
        return type(result), str(result), tuple(result.tokens.tolist())
    logprobs = [(t.chosen, t.top_tokens) for t in result.logprobs]
    return tuple(result.tokens.tolist()), result.finish_reason, result.stop_token, len(logprobs)


def check_valid(grammar, query, result):
    """Asserts that a text that ended by itself fulfils its schema. Returns whether it ended."""
    ended = not isinstance(result, Exception) and result.stop_token is not None
    is_schema = isinstance(grammar, Grammar) and grammar.kind == "json_schema"
    if ended and is_schema and query.params.stop_token_ids == (result.stop_token,):
        fields = json.loads(grammar.text)
        validator = jsonschema_rs.validator_for(fields, validate_formats=True)
        assert validator.is_valid(json.loads(read(result.tokens))), read(result.tokens)
    return ended


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafter", ["none", "suffix", "draft_model"])
def test_a_constrained_text_is_that_without_drafts(drafter, late, monkeypatch):
    """Also if a thread fills masks beside the forward pass, as for large vocabularies."""
    if late:
        monkeypatch.setattr(text_scheduler, "LATE_VOCABULARY", 0)
    random = np.random.default_rng(list(EVERY).index(drafter))
    model = shared_model()
    names = [*GRAMMARS, *GRAMMARS]
    queries = [drawn_query(random, name, Speculation(drafter)) for name in names]
    wanted = results(engine_for(model, 2000), [replace(q, speculation=UNDRAFTED) for q in queries])
    engine = engine_for(model, 60, {drafter: EVERY[drafter](model)})  # pages for a few: preemption
    found = results(engine, queries)
    assert list(map(outcome, found)) == list(map(outcome, wanted))
    grammars = [GRAMMARS[name] for name in names]
    ended = [check_valid(*case) for case in zip(grammars, queries, found, strict=True)]
    assert sum(ended) > len(ended) / 3
    assert all(isinstance(one, NoTokenLeft) for one in found if isinstance(one, Exception))
    texts = [one for one in found if not isinstance(one, Exception)]
    assert sum(one.timing.forwards for one in texts) < sum(len(one.tokens) for one in texts)
    assert_no_leak(engine)


def texts_are_equal(random, drafter, engine, plain, some):
    """Asserts that texts of drawn schemas and of GRAMMARS are those without drafts, and valid.

    Args:
        random: What draws them. Some prompts have several seeds.
        drafter: Name of the drafter.
        engine: An engine with it.
        plain: An engine without drafts.
        some: Most texts that run together.

    Returns:
        The number of texts, and how many of them ended by themselves.
    """
    schemas = [schema(**drawn_schema(random)) for _ in range(15)]
    grammars = [*schemas, *schemas, *GRAMMARS.values(), *schemas]
    queries = [drawn_query(random, one, Speculation(drafter)) for one in grammars[:-15]]
    queries += [replace(q, params=replace(q.params, seed=q.params.seed + 1)) for q in queries[:15]]
    wanted = results(plain, [replace(query, speculation=UNDRAFTED) for query in queries])
    found = []
    for first in range(0, len(queries), some):
        found += results(engine, queries[first : first + some])
    ended = 0
    for case in zip(grammars, queries, found, wanted, strict=True):
        assert outcome(case[2]) == outcome(case[3]), case[0]
        ended += check_valid(*case[:3])
    assert_no_leak(engine)
    return len(queries), ended


@pytest.mark.slow
@pytest.mark.parametrize("drafter", list(EVERY))
def test_many_texts_of_drawn_schemas(drafter):
    """Each drafter has 45 schemas of its own. Pages for a few texts: most are preempted."""
    random, model = np.random.default_rng(100 + list(EVERY).index(drafter)), shared_model()
    plain, counted = engine_for(model, 2000), Counted()
    launched = engine_for(model, 120, {drafter: EVERY[drafter](model)})
    captured = with_graphs(model, counted, SHAPES[2:], 60, {drafter: EVERY[drafter](model)})
    rounds = ((launched, 60), (launched, 60), (captured, 8))
    counts = [texts_are_equal(random, drafter, one, plain, some) for one, some in rounds]
    texts, ended = map(sum, zip(*counts, strict=True))
    print(drafter, texts, "texts,", ended, "ended,", counted.replays, "replays")
    assert ended > texts / 2 and counted.replays > 5


def test_captured_steps_write_constrained_texts():
    """Beside free texts, whose rows have no mask, and after a step without any mask."""
    random, drafter = np.random.default_rng(7), "merged"
    model, counted = shared_model(), Counted()
    queries = [drawn_query(random, name, Speculation(drafter)) for name in GRAMMARS]
    queries[::5] = [replace(query, constraint=None) for query in queries[::5]]
    wanted = results(engine_for(model, 2000), [replace(q, speculation=UNDRAFTED) for q in queries])
    engine = with_graphs(model, counted, SHAPES[2:], 200, {drafter: EVERY[drafter](model)})
    assert list(map(outcome, results(engine, queries))) == list(map(outcome, wanted))
    assert list(map(outcome, results(engine, queries[::5]))) == list(map(outcome, wanted[::5]))
    assert counted.replays > 5
    assert_no_leak(engine)


def test_a_constrained_text_is_that_of_plain_decoding():
    random, model = np.random.default_rng(5), shared_model()
    queries = [drawn_query(random, name, UNDRAFTED) for name in GRAMMARS]
    found = results(engine_for(model, 2000), queries)
    for query, one in zip(queries, found, strict=True):
        if not isinstance(one, Exception):
            assert one.tokens.tolist() == plain_constrained(model, query), query
