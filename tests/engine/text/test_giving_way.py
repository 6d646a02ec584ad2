"""A waiting text does not wait for the end of a large body: a text of the body gives way."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.core.client import LOCAL
from recserve.core.errors import DeadlineExceeded
from recserve.core.request import Prefix, PromptQuery
from recserve.engine import request_queue
from recserve.engine import scheduler as scheduler_module
from recserve.engine.engine import Engine
from recserve.engine.text_sequence import TextSequence
from recserve.models.inputs import NodeInputs
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.grids import chosen, sampled
from tests.support.recorded_steps import SHAPES, Counted, with_graphs
from tests.support.text_engines import (
    MAKERS,
    assert_forgotten,
    assert_no_leak,
    engine_for,
    plain_texts,
    prompts,
    shared_model,
    undrafted,
)
from tests.support.text_plain import TableDrafter, plain


@pytest.fixture(autouse=True)
def slow_turns(monkeypatch):
    """Later groups of a body stay behind other bodies, however slowly the test runs."""
    monkeypatch.setattr(scheduler_module, "GROUP_DELAY_S", 1e6)


# Drafters and parameters that run by default.
SHOWN = ("none-warm", "draft_model-frequency", "mask_tokens-everything")


@pytest.fixture(scope="module")
def model():
    return shared_model()


def text(prompt: np.ndarray, tokens: int, group: int = 0, **fields) -> TextQuery:
    """Returns a greedy text."""
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return TextQuery(prompt, params, group=group, **fields)


def watch(engine: Engine) -> list[TextSequence]:
    """Returns a list of the texts that give way from now on."""
    scheduler, gone = engine.schedulers["text"], []
    give_way: Callable = scheduler.give_way

    def watched(other):
        last = give_way(other)
        gone.extend([] if last is None else [last])
        return last

    scheduler.give_way = watched
    return gone


def steps_until(engine: Engine, condition: Callable[[], bool]) -> int:
    """Steps the engine until the condition holds, and returns the number of steps."""
    count = 0
    while not condition():
        assert engine.step()
        count += 1
    return count


def run_out(engine: Engine) -> None:
    """Steps the engine until it has no request."""
    while engine.step():
        pass


def rows_of_steps(engine: Engine) -> list[list[int]]:
    """Returns a list that gets the rows of each piece of each forward pass."""
    runner, rows = engine.schedulers["text"].runner, []
    forward = runner.forward

    def counted(pieces, *args):
        rows.append([len(piece.inputs) for piece in pieces])
        return forward(pieces, *args)

    runner.forward = counted
    return rows


@pytest.mark.parametrize("steps", chosen((1, 8, 45), "8"))
def test_a_text_behind_a_large_body_starts_at_once(steps, model):
    """However far the body is: in its prompts, in its first texts, among its last ones."""
    engine = engine_for(model, pages=2000)
    gone = watch(engine)
    body = prompts(128, low=20, high=24)
    futures = [engine.submit(text(p, 30, n // 4)) for n, p in enumerate(body)]
    for _ in range(steps):
        engine.step()
    first: list[object] = []
    later = engine.submit(text(np.array([1, 2, 3]), 2, on_commit=first.append))
    assert steps_until(engine, lambda: bool(first)) <= 2
    assert steps_until(engine, later.done) <= 1
    assert len(gone) == 1
    run_out(engine)
    assert all(len(future.result(0).tokens) == 30 for future in futures)
    assert_no_leak(engine)


def test_prompt_tokens_go_to_the_text_that_is_served_first(model):
    engine = engine_for(model)
    scheduler = engine.schedulers["text"]
    scheduler.limits = type(scheduler.limits)(prefill_tokens=8)
    for number, prompt in enumerate(prompts(3, low=40, high=41)):
        engine.submit(text(prompt, 4, number + 1))
    engine.step()
    later = engine.submit(text(np.arange(8), 1))
    assert steps_until(engine, later.done) == 1


def disturb(engine: Engine, name: str, parameters: str) -> None:
    """Runs a body of eight texts, with few places, beside other texts. Checks that texts of
    the body give way, and that each of them is the plain text.
    """
    gone, speculation = watch(engine), Speculation(name, num_tokens=2)
    wanted = [plain_texts()[parameters, number] for number in range(8)]
    futures = [
        engine.submit(TextQuery(prompt, params, speculation, group=number))
        for number, (prompt, (params, *_)) in enumerate(zip(prompts(8), wanted, strict=True))
    ]
    others = []
    for number in range(12):
        engine.step()
        engine.step()
        request = TextQuery(np.array([1, number]), SamplingParams(max_tokens=1), speculation)
        others.append(engine.submit(request))
    run_out(engine)
    assert [f.result(0).tokens.tolist() for f in futures] == [tokens for _, tokens, *_ in wanted]
    assert all(len(f.result(0).tokens) == 1 for f in others)
    assert len(gone) > 2 and any(s.context.num_output for s in gone)
    assert_no_leak(engine)


@pytest.mark.parametrize(
    "name,parameters",
    sampled(("none", *MAKERS), ("warm", "everything", "frequency"), default=SHOWN),
)
def test_texts_that_give_way_stay_the_same(name, parameters, model):
    """Texts of a body give way in their prompts and between tokens, again and again."""
    drafters = {} if name == "none" else {name: MAKERS[name](model)}
    disturb(engine_for(model, drafters=drafters, max_running=2), name, parameters)
    for drafter in drafters.values():
        assert_forgotten(drafter)


@pytest.mark.parametrize("parameters", chosen(("warm", "everything"), "everything"))
def test_texts_that_give_way_stay_the_same_in_captured_steps(parameters, model):
    """They lose their row on the device, and get their token counts back."""
    counted = Counted()
    engine = with_graphs(model, counted, SHAPES[:3:2])
    engine.config = replace(engine.config, max_running=2)
    disturb(engine, "none", parameters)
    assert counted.replays > 8


def test_a_body_alone_has_the_same_steps(model):
    """Without other requests, no text gives way, and groups change no forward pass."""
    bodies = []
    for groups in (False, True):
        engine = engine_for(model, max_running=5)
        gone, rows = watch(engine), rows_of_steps(engine)
        for number, prompt in enumerate(prompts(16)):
            engine.submit(text(prompt, 3 + number % 5, number // 2 if groups else 0))
        run_out(engine)
        assert not gone
        bodies.append(rows)
    assert bodies[0] == bodies[1]


def test_an_unloaded_text_has_the_same_steps(model):
    engine = engine_for(model)
    rows = rows_of_steps(engine)
    engine.run(text(np.arange(9), 3))
    assert rows == [[8, 1], [1], [1]]


def displaced(engine: Engine, **fields) -> TextSequence:
    """Submits a text to an engine with one place, and returns it after it has given way."""
    gone = watch(engine)
    engine.submit(text(np.arange(6), 20, group=1, **fields))
    for _ in range(3):
        engine.step()
    engine.submit(text(np.array([1]), 5))
    engine.step()
    (sequence,) = gone
    assert list(engine.queue.waiting) == gone and sequence.context.num_output == 3
    return sequence


def test_a_cancelled_text_that_gave_way_leaves_the_queue(model):
    engine = engine_for(model, max_running=1)
    sequence = displaced(engine)
    assert sequence.future.cancel()
    engine.step()
    assert not engine.queue
    run_out(engine)
    assert sequence.context.num_output == 3
    assert_no_leak(engine)


def test_a_late_text_that_gave_way_leaves_the_queue(model, monkeypatch):
    engine = engine_for(model, max_running=1)
    sequence = displaced(engine, deadline_s=time.monotonic() + 1e6)
    monkeypatch.setattr(request_queue, "has_expired", lambda request: request is sequence.request)
    engine.step()
    assert not engine.queue and isinstance(sequence.future.exception(0), DeadlineExceeded)
    run_out(engine)
    assert_no_leak(engine)


def test_texts_of_equal_turns_keep_their_places(model):
    engine = engine_for(model, max_running=2)
    gone = watch(engine)
    futures = [engine.submit(text(prompt, 6)) for prompt in prompts(6)]
    for sequence in engine.queue.waiting:
        sequence.submitted_s = 1.0
    run_out(engine)
    assert not gone and all(future.done() for future in futures)


def test_a_text_that_gives_way_often_still_ends(model):
    """Later requests pass it only until its turn comes."""
    engine = engine_for(model, max_running=1)
    gone, ended = watch(engine), []
    whole, *_ = plain(model, list(range(6)), SamplingParams(temperature=0, max_tokens=10))

    def submit(request: TextQuery, submitted_s: float):
        future = engine.submit(request)
        list(engine.queue.waiting)[-1].submitted_s = submitted_s
        future.add_done_callback(lambda _: ended.append(submitted_s))
        return future

    body = submit(text(np.arange(6), 10), 100.5)
    for submitted_s in range(90, 120):
        engine.step()
        submit(text(np.array([1, 2]), 2), float(submitted_s))
    run_out(engine)
    assert body.result(0).tokens.tolist() == whole
    assert gone and all(s.future is body for s in gone)
    assert ended == sorted(ended) and len(ended) == 31


def test_only_one_text_gives_way_to_a_request(model):
    engine = engine_for(model, max_running=4)
    gone = watch(engine)
    for number, prompt in enumerate(prompts(8)):
        engine.submit(text(prompt, 12, group=number + 1))
    engine.step()
    for count in (1, 2, 3):
        engine.submit(text(np.array([count]), 12))
        engine.step()
        engine.step()
        assert len(gone) == count
        assert engine.schedulers["text"].num_running == 4
    run_out(engine)
    assert_no_leak(engine)


def test_an_urgent_text_takes_the_place_of_another(model):
    engine = engine_for(model, max_running=1)
    slow = engine.submit(text(np.arange(5), 20, priority=1))
    engine.step()
    fast = engine.submit(text(np.arange(5), 3))
    assert steps_until(engine, fast.done) <= 3
    assert not slow.done()
    run_out(engine)
    assert len(slow.result(0).tokens) == 20


def test_a_draft_is_forgotten_with_the_place(model):
    """A drafter learns that a text gave way, as it does after a preemption."""
    prompt = tuple(range(6))
    drafter = TableDrafter("right", {prompt: [0] * 40})
    engine = engine_for(model, drafters={"table": drafter}, max_running=1)
    sequence = displaced(engine, speculation=Speculation("table", num_tokens=0))
    assert drafter.forgotten == [sequence.context.id]


def full_pool(model) -> tuple[Engine, list, list[list[int]]]:
    """Returns an engine with 30 pages, the texts of a body that use all of them, and their plain
    tokens.
    """
    engine = engine_for(model, pages=30)
    requests = []
    for number, prompt in enumerate(prompts(8, seed=3, low=8, high=12)):
        params = SamplingParams(seed=number, max_tokens=24, presence_penalty=0.2)
        requests.append(TextQuery(prompt, params, group=number))
    wanted = undrafted(model, requests)
    futures = [engine.submit(request) for request in requests]
    for _ in range(6):
        engine.step()
    assert engine.schedulers["text"].kv.num_available < 3
    return engine, futures, wanted


@pytest.mark.parametrize("kind", ["text", "scores"])
def test_a_body_gives_its_pages(kind, model):
    """A text or a scoring request gets pages from texts that are served later, which resume."""
    engine, futures, wanted = full_pool(model)
    if kind == "text":
        other = engine.submit(text(np.arange(20), 1))
    else:
        empty = np.zeros(0, np.int64)
        prefix = Prefix(NodeInputs(torch.from_numpy(empty)), empty)
        other = engine.submit(PromptQuery(prefix, np.arange(20), 2))
    assert steps_until(engine, other.done) <= 2
    assert not any(future.done() for future in futures)
    run_out(engine)
    assert [future.result(0).tokens.tolist() for future in futures] == wanted
    assert_no_leak(engine)


def test_no_pages_are_taken_that_are_too_few(model):
    """Nor from texts that are served earlier."""
    engine, futures, _ = full_pool(model)
    scheduler = engine.schedulers["text"]
    free, running = scheduler.kv.num_available, len(scheduler.running)
    (last,) = scheduler.running[-1:]
    early, late = (
        scheduler.sequence_of(text(np.arange(9), 1, g), None, None, "text", LOCAL) for g in (0, 9)
    )
    assert not scheduler.free_pages(31, early) and not scheduler.free_pages(free + 1, late)
    assert not scheduler.free_pages(free, early)
    assert (scheduler.kv.num_available, len(scheduler.running)) == (free, running)
    assert scheduler.free_pages(free + 1, early) and last in scheduler.preempted
    run_out(engine)
    assert all(future.done() for future in futures)
