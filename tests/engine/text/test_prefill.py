"""Prompts: what several texts begin with is computed once, and the first step drafts."""

import numpy as np
import pytest

from recserve.core.client import Client
from recserve.engine.text_scheduler import TextLimits, shared_rows
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.text_engines import MAKERS, assert_no_leak, engine_for
from tests.support.text_plain import VOCABULARY, TableDrafter, drawn_model, plain

PAGE = 4
LONG = np.random.default_rng(3).integers(0, VOCABULARY, 30)


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


def counting(engine) -> list[int]:
    """The rows of every forward from now on."""
    runner, rows = engine.schedulers["text"].runner, []
    forward = runner.forward

    def counted(pieces, aux_states=None):
        rows.append(sum(piece.tree.num_nodes for piece in pieces))
        return forward(pieces, aux_states)

    runner.forward = counted
    return rows


def limited(engine, prefill_tokens: int):
    engine.schedulers["text"].limits = TextLimits(prefill_tokens=prefill_tokens)
    return engine


def written(engine, futures) -> list[list[int]]:
    while engine.step():
        pass
    return [future.result(0).tokens.tolist() for future in futures]


def test_copies_of_a_prompt_compute_it_once(model):
    """Four texts of one prompt of 30 tokens: 29 rows of prompt, then a row per token."""
    params = [SamplingParams(seed=seed, max_tokens=6) for seed in range(4)]
    wanted = [plain(model, LONG.tolist(), p)[0] for p in params]
    engine = engine_for(model)
    rows = counting(engine)
    answers = engine.run_many([TextQuery(LONG, p) for p in params])
    assert [a.tokens.tolist() for a in answers] == wanted
    assert rows == [29 + 1, 1 + 3, 4, 4, 4, 4, 3]
    assert [a.timing.prefix_cached for a in answers] == [0, 29, 29, 29]
    assert [a.timing.prefix_computed for a in answers] == [29, 0, 0, 0]
    assert_no_leak(engine)


def test_another_prompt_with_the_same_beginning_waits_for_its_pages(model):
    """20 of 30 tokens are the same, 5 pages; the third text has nothing in common with them."""
    other = np.concatenate([LONG[:22], (LONG[22:] + 1) % VOCABULARY])
    apart = (LONG[:7] + 1) % VOCABULARY
    params = SamplingParams(seed=2, max_tokens=4)
    wanted = [plain(model, p.tolist(), params)[0] for p in (LONG, other, apart)]
    engine = engine_for(model)
    rows = counting(engine)
    futures = [engine.submit(TextQuery(p, params)) for p in (LONG, other, apart)]
    assert written(engine, futures) == wanted
    assert rows == [29 + 1 + 6 + 1, (29 - 20) + 1 + 1 + 1, 3, 3, 1]
    assert futures[1].result(0).timing.prefix_cached == 20
    assert_no_leak(engine)


def test_nobody_waits_for_the_prompt_of_another_salt(model):
    """The wait would tell that another client's prompt begins like one's own."""
    engine = engine_for(model)
    rows, query = counting(engine), TextQuery(LONG, SamplingParams(max_tokens=1))
    futures = [engine.submit(query, Client(salt=salt)) for salt in (b"", b"a", b"b", b"a")]
    written(engine, futures)
    assert rows == [3 * (29 + 1), 1]
    assert [f.result(0).timing.prefix_cached for f in futures] == [0, 0, 0, 29]


def test_in_chunks_pages_are_shared_as_they_come(model):
    """With 12 rows a step, the other prompt goes on as soon as its 20 tokens are there."""
    other = np.concatenate([LONG[:20], (LONG[20:] + 1) % VOCABULARY])
    params = SamplingParams(seed=2, max_tokens=3)
    wanted = [plain(model, p.tolist(), params)[0] for p in (LONG, other)]
    engine = limited(engine_for(model), 12)
    rows = counting(engine)
    futures = [engine.submit(TextQuery(p, params)) for p in (LONG, other)]
    assert written(engine, futures) == wanted
    assert sum(rows) == 29 + 9 + 6
    assert rows[:3] == [12, 12, 5 + 1 + 7]
    assert_no_leak(engine)


def test_the_others_go_on_when_the_first_is_cancelled(model):
    """Two chunks of eight are done by then, and their four pages stay."""
    params = SamplingParams(seed=5, max_tokens=3)
    engine = limited(engine_for(model), 8)
    rows = counting(engine)
    futures = [engine.submit(TextQuery(LONG, params)) for _ in range(3)]
    for _ in range(2):
        engine.step()
    futures[0].cancel()
    assert written(engine, futures[1:]) == [plain(model, LONG.tolist(), params)[0]] * 2
    assert sum(rows) == 29 + 3 + 3
    assert_no_leak(engine)


def test_a_more_urgent_copy_does_not_wait(model):
    engine = limited(engine_for(model), 8)
    order: list[str] = []
    params = SamplingParams(max_tokens=1)

    def request(name: str, priority: int) -> TextQuery:
        listen = lambda news: order.append(name) and False  # noqa: E731
        return TextQuery(LONG, params, priority=priority, on_commit=listen)

    futures = [engine.submit(request("first", 1))]
    engine.step()
    futures += [engine.submit(request("second", 1)), engine.submit(request("urgent", 0))]
    written(engine, futures)
    assert order == ["urgent", "first", "second"]
    assert_no_leak(engine)


def test_copies_with_too_few_pages(model):
    """Eight copies of which three fit: those without pages come back and lose nothing."""
    params = [SamplingParams(seed=seed, max_tokens=20, temperature=1.1) for seed in range(8)]
    engine = engine_for(model, pages=30)
    futures = [engine.submit(TextQuery(LONG, p)) for p in params]
    assert written(engine, futures) == [plain(model, LONG.tolist(), p)[0] for p in params]
    assert_no_leak(engine)


@pytest.mark.parametrize(
    "own,other,shared",
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], 4), ([1, 2], [2, 2], 0)]
    + [([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], 5), ([1, 2, 3, 4, 5], [1, 2, 9, 4], 0)],
)
def test_shared_rows(own, other, shared):
    """In pages of four, the last of which may end early."""
    assert shared_rows(own, other, PAGE) == shared_rows(other, own, PAGE) == shared


@pytest.mark.parametrize("rule", ["sample", "greedy", "typical"])
def test_a_short_answer_takes_one_forward(rule, model):
    """Prompt, draft and bonus token together, from an empty cache and from a warm one."""
    temperature = 0.0 if rule == "greedy" else 0.7
    params = SamplingParams(temperature, seed=3, max_tokens=6)
    tokens, *_ = plain(model, LONG.tolist(), params)
    engine = engine_for(
        model, drafters={"t": TableDrafter("right", {tuple(LONG.tolist()): tokens})}
    )
    for cached in (0, 29):
        answer = engine.run(TextQuery(LONG, params, Speculation("t", rule)))
        assert answer.timing.prefix_cached == cached
        assert answer.counts.num_drafts >= 1
        if rule != "typical":
            assert answer.tokens.tolist() == tokens and answer.timing.forwards == 1


@pytest.mark.parametrize("prefill_tokens", [512, 8])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_drafter_drafts_in_the_first_step(name, prefill_tokens, model):
    """A prompt that repeats itself gives the lookups something to find; Medusa's heads, and
    drafters that read states, need a hidden state, which only a cached prompt has.
    """
    prompt = np.array([7, 3, 9, 1] * 6)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    tokens, *_ = plain(model, prompt.tolist(), params)
    drafter = MAKERS[name](model)
    engine = limited(engine_for(model, drafters={name: drafter}), prefill_tokens)
    needs_state = bool(drafter.hidden_layers)
    rows = counting(engine)
    for prompt_rows in ([8, 8, 7] if prefill_tokens == 8 else [23], [0]):
        rows.clear()
        answer = engine.run(TextQuery(prompt, params, Speculation(name)))
        assert answer.tokens.tolist() == tokens
        assert rows[: len(prompt_rows) - 1] == prompt_rows[:-1]
        drafted = rows[len(prompt_rows) - 1] - prompt_rows[-1] - 1
        assert (drafted == 0) == (needs_state and prompt_rows != [0])
        assert sum(rows) == answer.timing.nodes + sum(prompt_rows)
    assert_no_leak(engine)


@pytest.mark.parametrize("rule", ["rejection", "block", "multi_step"])
def test_drawn_drafts_in_the_first_step(rule, model):
    """The draft model is the target: everything it draws is kept, and one forward is enough."""
    engine = engine_for(model, drafters={"draft_model": MAKERS["draft_model"](model)})
    params = SamplingParams(seed=11, max_tokens=5)
    answer = engine.run(TextQuery(LONG, params, Speculation("draft_model", rule)))
    assert answer.timing.forwards == 1 and answer.counts.num_accepted_tokens == 4


def count_tokens(drafter) -> list[int]:
    """Returns a list that receives the number of tokens of each pass of a draft model."""
    counts, run = [], drafter._run

    def counted(tokens, *args):
        counts.append(tokens.shape[0])
        return run(tokens, *args)

    drafter._run = counted
    return counts


@pytest.mark.parametrize("name", ["draft_model", "specinfer"])
def test_a_draft_model_computes_no_token_of_a_cached_prefix(name, model):
    """Of a prompt that is new, in chunks of 8 states, and of one that begins with it."""
    drafter = MAKERS[name](model)
    engine = limited(engine_for(model, drafters={name: drafter}), 8)
    computed = [count_tokens(part) for part in drafter.parts]
    params = SamplingParams(0.0, max_tokens=4)
    engine.run(TextQuery(LONG, params, Speculation(name)))
    assert all(sum(own) >= len(LONG) and max(own) <= 9 for own in computed)
    for own in computed:
        own.clear()
    longer = np.concatenate([LONG, [5, 6]])
    answer = engine.run(TextQuery(longer, params, Speculation(name)))
    assert answer.timing.prefix_cached >= len(LONG) - 2
    assert all(0 < own[0] <= 4 for own in computed)
