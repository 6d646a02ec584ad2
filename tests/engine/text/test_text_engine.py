"""Text in the engine equals plain decoding, token for token, with any drafter and any batch.

All in float32. Logits of a tree differ from those of a plain forward in the last bits, so the tests
would notice a tie within about 1e-5; the drawn models have none.
"""

import time
from concurrent.futures import CancelledError, Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.core.errors import DeadlineExceeded
from recserve.drafters.none import NoDrafter
from recserve.drafters.suffix.drafter import SuffixDrafter
from recserve.engine.scheduler import RequestTooLarge
from recserve.engine.text_scheduler import PromptTooLong
from recserve.engine.text_sequence import TextSequence, context_of
from recserve.models.loading import load_language_model
from recserve.models.packing import pack_weights
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.grids import covering
from tests.support.paths import reference
from tests.support.text_engines import (
    PARAMETERS,
    SPREAD,
    among_others,
    assert_no_leak,
    engine_for,
    plain_texts,
    prompts,
    shared_model,
    texts_by_prompt,
    undrafted,
)
from tests.support.text_plain import VOCABULARY, TableDrafter, drawn_model, last_logits, plain

KINDS = ("right", "wrong", "tree", "auxiliary", "past", "mixed")


@pytest.fixture(scope="module")
def model():
    return shared_model()


@pytest.fixture(scope="module")
def expected():
    return plain_texts()


@pytest.mark.parametrize("name", PARAMETERS)
def test_plain_decoding(name, model, expected):
    """Two texts alone, and eight together."""
    engine = engine_for(model)
    wanted = [expected[name, number] for number in range(8)]
    requests = [TextQuery(p, params) for p, (params, *_) in zip(prompts(8), wanted, strict=True)]
    alone = [engine.run(request) for request in requests[:2]]
    for answer, expectation in zip(
        [*alone, *engine.run_many(requests)], [*wanted[:2], *wanted], strict=True
    ):
        assert (answer.tokens.tolist(), answer.finish_reason, answer.stop_token) == expectation[1:]
    assert_no_leak(engine)


WITHOUT = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "logit_bias": {}, "bad_words": (), "stop_token_ids": (),
    "min_tokens": 0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("field", WITHOUT)
def test_each_parameter_changes_a_text_of_the_spread(field, model):
    """So that tests of the spread alone notice a parameter that is ignored."""
    for name in SPREAD:
        requests, wanted = among_others(name, Speculation("none"))
        for request, tokens in zip(requests, wanted, strict=True):
            params = replace(request.params, **{field: WITHOUT[field]})
            written, *_ = plain(model, request.prompt.tolist(), params)
            if written != tokens:
                return
    pytest.fail(f"no text depends on {field}")


@pytest.mark.parametrize("kind,name", covering(KINDS, tuple(PARAMETERS)))
def test_drafts_change_nothing(name, kind, model, expected):
    """Alone, and eight together with neighbours of other parameters; from an empty cache and a
    warm one.
    """
    drafter = TableDrafter(kind, texts_by_prompt(name))
    engine = engine_for(model, drafters={"table": drafter})
    speculation = Speculation("table")
    alone = prompts(8)[3]
    params, tokens, reason, stop = expected[name, 3]
    for _ in range(2):
        answer = engine.run(TextQuery(alone, params, speculation))
        assert answer.tokens.tolist() == tokens
        assert (answer.finish_reason, answer.stop_token) == (reason, stop)
    requests, wanted = among_others(name, speculation)
    answers = engine.run_many(requests)
    assert [a.tokens.tolist() for a in answers] == wanted
    if kind == "right":
        kept = sum(a.counts.num_accepted_tokens for a in answers[::2])
        steps = sum(a.timing.forwards for a in answers[::2])
        assert kept > 0 and steps < sum(len(a.tokens) for a in answers[::2])
    if kind == "wrong":
        assert answers[0].counts.num_accepted_tokens == 0
    assert_no_leak(engine)


def test_drafts_change_nothing_with_packed_weights():
    model = drawn_model(1)
    pack_weights(model)
    prompt = prompts(1)[0]
    for temperature in (0.0, 1.2):
        params = SamplingParams(temperature=temperature, seed=4, max_tokens=20)
        tokens, *_ = plain(model, prompt.tolist(), params)
        drafter = TableDrafter("mixed", {tuple(prompt.tolist()): tokens})
        engine = engine_for(model, drafters={"table": drafter})
        for _ in range(3):
            answer = engine.run(TextQuery(prompt, params, Speculation("table")))
            assert answer.tokens.tolist() == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_context_limit_inside_the_tree(kind):
    model = drawn_model(2, positions=16)
    prompt = prompts(1, seed=4, low=6, high=7)[0]
    for limit in (100, 9):
        params = SamplingParams(seed=3, max_tokens=limit)
        tokens, reason, _ = plain(model, prompt.tolist(), params)
        assert reason == "length" and len(tokens) == min(limit, 16 - len(prompt))
        drafter = TableDrafter(kind, {tuple(prompt.tolist()): tokens})
        engine = engine_for(model, drafters={"table": drafter})
        answer = engine.run(TextQuery(prompt, params, Speculation("table")))
        assert answer.tokens.tolist() == tokens and answer.finish_reason == "length"


def test_end_of_text_inside_the_tree(model):
    """The draft goes on after the stop token; the text does not."""
    prompt = prompts(1, seed=9)[0]
    tokens, _, _ = plain(model, prompt.tolist(), SamplingParams(seed=1, max_tokens=12))
    drafter = TableDrafter("past", {tuple(prompt.tolist()): tokens})
    for place in range(12):
        stop = tokens[place]
        first = tokens.index(stop)
        engine = engine_for(model, drafters={"table": drafter})
        params = SamplingParams(seed=1, max_tokens=12, stop_token_ids=(stop,))
        answer = engine.run(TextQuery(prompt, params, Speculation("table")))
        assert answer.tokens.tolist() == tokens[:first]
        assert (answer.finish_reason, answer.stop_token) == ("stop", stop)
        again = engine.run(TextQuery(prompt, params))
        assert again.tokens.tolist() == tokens[:first]
        assert_no_leak(engine)


@pytest.mark.parametrize("rule", ["sample", "rejection", "block", "typical", "greedy"])
def test_every_rule_is_greedy_at_temperature_0(rule, model, expected):
    params, tokens, *_ = expected["greedy", 2]
    prompt = prompts(8)[2]
    drafter = TableDrafter("right", {tuple(prompt.tolist()): tokens})
    engine = engine_for(model, drafters={"table": drafter})
    answer = engine.run(TextQuery(prompt, params, Speculation("table", rule)))
    assert answer.tokens.tolist() == tokens
    assert answer.counts.num_accepted_tokens > 0


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_other_rules_run_to_the_end(rule, model):
    """Their text is another draw than the plain one, so only its shape can be checked here."""
    prompt = prompts(8)[2]
    drafter = TableDrafter("right", {tuple(prompt.tolist()): [1] * 40})
    engine = engine_for(model, drafters={"table": drafter})
    request = TextQuery(prompt, SamplingParams(max_tokens=30), Speculation("table", rule))
    first, second = engine.run(request), engine.run(request)
    assert first.tokens.tolist() == second.tokens.tolist() and len(first.tokens) == 30
    assert_no_leak(engine)


def test_a_rule_that_would_be_biased_fails_its_request_alone(model, expected):
    prompt = prompts(8)[0]
    params, tokens, *_ = expected["hot", 0]
    drafter = TableDrafter("right", {tuple(prompt.tolist()): []})
    drafter.draws = True  # but it never does
    engine = engine_for(model, drafters={"t": drafter})
    bad = engine.submit(TextQuery(prompt, params, Speculation("t", "multi_step")))
    good = engine.submit(TextQuery(prompt, params))
    while engine.step():
        pass
    with pytest.raises(ValueError, match="biased"):
        bad.result(0)
    assert good.result(0).tokens.tolist() == tokens
    assert_no_leak(engine)


def test_drafter_and_listener_failures_stay_with_their_requests(model, expected):
    class Broken(TableDrafter):
        def propose(self, contexts, budgets):
            raise RuntimeError("no draft today")

    def listener(news):
        raise OSError("the client went away")

    engine = engine_for(model, drafters={"broken": Broken("right", {})})
    params, tokens, *_ = expected["warm", 1]
    prompt = prompts(8)[1]
    futures = [
        engine.submit(TextQuery(prompt, params, Speculation("broken"))),
        engine.submit(TextQuery(prompt, params, on_commit=listener)),
        engine.submit(TextQuery(prompt, params)),
    ]
    while engine.step():
        pass
    assert isinstance(futures[0].exception(), RuntimeError)
    assert isinstance(futures[1].exception(), OSError)
    assert futures[2].result(0).tokens.tolist() == tokens
    assert_no_leak(engine)


def test_chunked_prefill_and_prefix_cache_change_nothing(model):
    engine = engine_for(model)
    scheduler = engine.schedulers["text"]
    scheduler.limits = type(scheduler.limits)(prefill_tokens=7)
    long = prompts(1, seed=5, low=40, high=41)[0]
    params = SamplingParams(seed=8, max_tokens=10)
    tokens, *_ = plain(model, long.tolist(), params)
    short = prompts(1, seed=6, low=30, high=31)[0]
    other, *_ = plain(model, short.tolist(), params)
    for _ in range(2):
        answers = engine.run_many([TextQuery(long, params), TextQuery(short, params)])
        assert [a.tokens.tolist() for a in answers] == [tokens, other]
    assert answers[0].timing.prefix_cached >= 36 and answers[0].timing.forwards == 10
    more = np.concatenate([long, tokens[:5]])
    longer, *_ = plain(model, more.tolist(), params)
    answer = engine.run(TextQuery(more, params))
    assert answer.tokens.tolist() == longer and answer.timing.prefix_cached >= 40


def test_preemption_loses_nothing(model):
    """Twelve texts that need three times the pages there are."""
    requests = []
    for number, prompt in enumerate(prompts(12, seed=3, low=5, high=12)):
        params = SamplingParams(seed=number, max_tokens=20, temperature=1.1, presence_penalty=0.2)
        kind = "table" if number % 2 else "none"
        requests.append(TextQuery(prompt, params, Speculation(kind), priority=number % 3))
    wanted = undrafted(model, requests)
    texts = {tuple(r.prompt.tolist()): t for r, t in zip(requests, wanted, strict=True)}
    drafter = TableDrafter("mixed", texts)
    engine = engine_for(model, pages=30, drafters={"table": drafter})
    scheduler = engine.schedulers["text"]
    most = 0
    futures = [engine.submit(r) for r in requests]
    while engine.step():
        most = max(most, len(scheduler.preempted))
    assert most > 0
    assert [f.result(0).tokens.tolist() for f in futures] == wanted
    assert_no_leak(engine)


def test_a_text_of_all_pages_runs_though_its_beginning_is_cached(model):
    """The partly filled page of the beginning is needed too, so it cannot be copied."""
    engine = engine_for(model, pages=8)
    prompt = np.arange(30)
    engine.run(TextQuery(prompt[:2], SamplingParams(max_tokens=1)))
    params = SamplingParams(temperature=0, max_tokens=2)
    future = engine.submit(TextQuery(prompt, params))
    for _ in range(4):
        engine.step()
    assert future.result(0).tokens.tolist() == plain(model, prompt.tolist(), params)[0]
    assert_no_leak(engine)


def test_priority_is_served_first(model):
    engine = engine_for(model, max_running=1)
    order = []
    params = SamplingParams(max_tokens=2)

    def listen(name):
        return lambda news: order.append(name) and False

    for name, priority in (("late", 5), ("early", -1), ("middle", 0)):
        prompt = np.array([1, 2, 3])
        engine.submit(TextQuery(prompt, params, priority=priority, on_commit=listen(name)))
    while engine.step():
        pass
    assert order == ["early", "early", "middle", "middle", "late", "late"]


def test_streaming_and_stopping_by_listener(model, expected):
    params, tokens, *_ = expected["warm", 5]
    prompt = prompts(8)[5]
    drafter = TableDrafter("right", {tuple(prompt.tolist()): tokens})
    engine = engine_for(model, drafters={"table": drafter})
    news = []
    request = TextQuery(prompt, params, Speculation("table", num_tokens=2), on_commit=news.append)
    answer = engine.run(request)
    assert [t for n in news for t in n.tokens] == answer.tokens.tolist() == tokens
    assert [n.finish_reason for n in news] == [None] * (len(news) - 1) + ["length"]
    assert max(len(n.tokens) for n in news) == 3

    seen = []

    def enough(n):
        seen.extend(n.tokens)
        return len(seen) >= 4

    answer = engine.run(TextQuery(prompt, params, Speculation("table"), on_commit=enough))
    assert answer.finish_reason == "stop" and answer.stop_token is None
    assert answer.tokens.tolist() == tokens[: len(seen)] and len(seen) >= 4


@torch.inference_mode()
def test_logprobs_of_written_tokens(model, expected):
    """Of the raw logits, whatever the parameters and the draft."""
    fields = expected["everything", 4][0].__dict__ | {"logprobs": 3}
    params = SamplingParams(**fields)
    prompt = prompts(8)[4]
    tokens = expected["everything", 4][1]
    drafter = TableDrafter("tree", {tuple(prompt.tolist()): tokens})
    engine = engine_for(model, drafters={"table": drafter})
    answer = engine.run(TextQuery(prompt, params, Speculation("table")))
    assert answer.tokens.tolist() == tokens and len(answer.logprobs) == len(tokens)
    assert answer.counts.num_accepted_tokens > 0
    for i, report in enumerate(answer.logprobs):
        row = last_logits(model, [*prompt.tolist(), *tokens[:i]]).log_softmax(-1)
        assert report.chosen == pytest.approx(float(row[tokens[i]]), abs=1e-4)
        assert report.top_tokens == tuple(row.topk(3).indices.tolist())
        np.testing.assert_allclose(report.top_values, row.topk(3).values, atol=1e-4)


def test_counts_of_a_draft(model, expected):
    params, tokens, *_ = expected["warm", 0]
    prompt = prompts(8)[0]
    drafter = TableDrafter("right", {tuple(prompt.tolist()): tokens})
    engine = engine_for(model, drafters={"table": drafter})
    answer = engine.run(TextQuery(prompt, params, Speculation("table", num_tokens=3)))
    # 12 tokens in steps of at most 3 drafted and 1 more, the first together with the prompt.
    assert answer.timing.forwards == 3
    assert (answer.counts.num_drafts, answer.counts.num_draft_tokens) == (3, 9)
    assert answer.counts.per_position == [3, 3, 3]
    assert answer.timing.nodes == 12


def test_wrong_requests_are_refused(model):
    engine = engine_for(model, pages=8)
    for request, error, message in (
        (TextQuery(np.array([], dtype=np.int64)), ValueError, "at least one token"),
        (TextQuery(np.arange(64) % 40), PromptTooLong, "64 tokens; the model has 64"),
        (TextQuery(np.array([1, 40])), ValueError, r"1\.\.40; the vocabulary has 40"),
        (
            TextQuery(np.array([1]), SamplingParams(logit_bias={41: 1.0})),
            ValueError,
            "sampling parameter",
        ),
        (
            TextQuery(np.array([1]), SamplingParams(max_tokens=60)),
            RequestTooLarge,
            "16 pages of 4 tokens, the pool has 8",
        ),
        (TextQuery(np.array([1]), speculation=Speculation("medusa")), ValueError, "drafter"),
        (TextQuery(np.array([1]), speculation=Speculation("none", "x")), ValueError, "verifier"),
    ):
        with pytest.raises(error, match=message):
            engine.submit(request)
    with pytest.raises(ValueError, match="num_tokens: expected int >= 0, got -2"):
        Speculation("none", num_tokens=-2)
    with pytest.raises(ValueError, match="empty path"):
        Speculation("none", tree=((0,), ()))
    with pytest.raises(ValueError, match="temperature: expected float >= 0.0, got -1"):
        SamplingParams(temperature=-1)


def test_deadlines(model):
    engine = engine_for(model)
    late = engine.submit(TextQuery(np.array([1, 2]), deadline_s=time.monotonic() - 1))
    slow = engine.submit(
        TextQuery(
            np.array([1, 2]),
            SamplingParams(max_tokens=50),
            deadline_s=time.monotonic() + 0.05,
            on_commit=lambda news: time.sleep(0.02),
        )
    )
    while engine.step():
        pass
    for future in (late, slow):
        assert isinstance(future.exception(), DeadlineExceeded)
    assert_no_leak(engine)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_soak_with_cancels(count, model):
    """Mixed requests through a pool that is too small, one in five cancelled."""
    random = np.random.default_rng(0)
    pool = prompts(40, seed=11)
    texts = {tuple(p.tolist()): random.integers(0, VOCABULARY, 40).tolist() for p in pool}
    drafter = TableDrafter("mixed", texts)
    engine = engine_for(model, pages=60, drafters={"table": drafter}, max_running=12)
    names = list(PARAMETERS)
    futures, reference = [], {}
    for number in range(count):
        fields = PARAMETERS[names[number % len(names)]]
        length = int(random.integers(1, 8))
        fields = {"max_tokens": length, "seed": number % 5} | fields
        fields["max_tokens"] = length
        fields["min_tokens"] = min(fields.get("min_tokens", 0), length)
        drafted = Speculation("table" if random.random() < 0.7 else "none")
        place = int(random.integers(40))
        request = TextQuery(
            pool[place], SamplingParams(**fields), drafted, priority=int(random.integers(3))
        )
        futures.append((place, repr(request.params), engine.submit(request)))
        while len(engine.queue) > 20:
            engine.step()
            if random.random() < 0.5:
                futures[int(random.integers(len(futures)))][2].cancel()
    while engine.step():
        pass
    finished = 0
    for place, params, future in futures:
        try:
            tokens = future.result(0).tokens.tolist()
        except CancelledError:
            continue
        finished += 1
        assert reference.setdefault((place, params), tokens) == tokens
    assert count / 2 < finished < count
    assert_no_leak(engine)
    assert not engine.schedulers["text"].preempted and set(drafter.forgotten)


@pytest.mark.parametrize(
    "kind,packed", covering(("none", "right", "tree"), {"plain": False, "packed": True})
)
def test_stories(kind, packed):
    """The reference checkpoint writes its known text."""
    folder = reference("stories260k")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the "
        "park. One day, she saw a big, red ball."
    )
    prompt = tokenizer.encode("Once upon a time").ids
    whole = tokenizer.encode(text).ids
    drafter = TableDrafter(kind, {tuple(prompt): whole[len(prompt) :]})
    model = load_language_model(folder)
    if packed:
        pack_weights(model)
    engine = engine_for(model, drafters={"table": drafter})
    params = SamplingParams(temperature=0.0, max_tokens=len(whole) - len(prompt))
    answer = engine.run(TextQuery(np.array(prompt), params, Speculation("table")))
    assert tokenizer.decode([*prompt, *answer.tokens.tolist()]) == text


@pytest.mark.parametrize(
    "limit,max_tokens,room", [(64, 9, 8), (64, 1, 0), (24, 50, 3), (21, 50, 0)]
)
def test_a_draft_leaves_room_for_the_token_after_it(limit, max_tokens, room):
    """A draft never reaches past the last token that the request or the positions allow."""
    request = TextQuery(np.arange(20), SamplingParams(max_tokens=max_tokens))
    text = TextSequence(
        request=request,
        future=Future(),
        submitted_s=0.0,
        model="text",
        context=context_of(request, 0),
        drafter=NoDrafter(),
        limit=limit,
    )
    assert text.budget(64).depth == room
    assert text.budget(2).depth == min(room, 2)


@pytest.mark.parametrize(("drafter", "pages"), [("none", 200), ("none", 30), ("suffix", 200)])
def test_steps_are_counted_by_their_tokens(drafter, pages, model):
    """Drawn texts; each prompt comes twice, so that the second finds it in the cache."""
    engine = engine_for(model, pages, {"suffix": SuffixDrafter()}, count_steps=True)
    lengths = np.random.default_rng(pages).integers(1, 20, 8).tolist()
    texts = [
        engine.run(TextQuery(prompt, SamplingParams(max_tokens=most), Speculation(drafter)))
        for prompt, most in zip(prompts(4) * 2, lengths[:4] * 2, strict=True)
    ]
    alone = dict(engine.stats().step_tokens)
    if drafter == "none":  # alone, each step writes one token
        assert sum(alone.values()) == sum(len(text.tokens) for text in texts)
    texts += engine.run_many(
        [
            TextQuery(prompt, SamplingParams(max_tokens=most), Speculation(drafter))
            for prompt, most in zip(prompts(8), lengths, strict=True)
        ]
    )
    tokens = sum(len(text.tokens) for text in texts) + sum(map(len, [*prompts(4) * 2, *prompts(8)]))
    found = engine.stats().step_tokens
    assert sum(size * count for size, count in found.items()) == tokens
    assert engine_for(model).stats().step_tokens is None
