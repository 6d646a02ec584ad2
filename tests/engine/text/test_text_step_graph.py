"""Text steps in fixed shapes: recorded once, replayed on other drafts, acceptances and lengths.

The answers must be those of plain decoding, token for token. What may not count holds a number that
would be seen in any sum: pages nobody has written, the spare slot, rows of no text. It is finite,
because attention on a CPU reads foreign slots and weighs them by zero.
"""

import pytest
import torch

from recserve.engine.capture import EagerRecorder
from recserve.engine.text_step_graph import StepShape, TextStepGraphs, TextStepLimits
from recserve.models.packing import pack_weights
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.verifiers import path
from tests.support import recorder
from tests.support.grids import chosen, covering, thin
from tests.support.recorded_steps import SHAPES, Counted, with_graphs
from tests.support.text_engines import (
    PARAMETERS,
    among_others,
    assert_no_leak,
    engine_for,
    plain_texts,
    prompts,
    shared_model,
    texts_by_prompt,
    undrafted,
)
from tests.support.text_plain import TableDrafter, drawn_model, plain


@pytest.fixture(scope="module")
def model():
    return shared_model()


@pytest.fixture(scope="module")
def expected():
    return plain_texts()


@pytest.fixture(scope="module")
def recorded(model):
    """One set of records for all parameters and drafts; `padded` runs the function anew each
    time.
    """
    made = {"replayed": Counted(), "padded": Counted(lambda step: step)}
    return {name: (with_graphs(model, counted), counted) for name, counted in made.items()}


@pytest.mark.parametrize(
    "kind,name",
    thin(covering(("none", "right", "auxiliary", "mixed"), tuple(PARAMETERS)), 3),
)
def test_replays_write_the_plain_text(name, kind, recorded, expected):
    """Alone, and eight together with neighbours of other parameters."""
    way = "padded" if kind == "mixed" else "replayed"
    engine, counted = recorded[way]
    engine.drafters["table"] = TableDrafter(kind, texts_by_prompt(name))
    speculation = Speculation("table")
    before = counted.replays
    params, tokens, *_ = expected[name, 3]
    answer = engine.run(TextQuery(prompts(8)[3], params, speculation))
    assert answer.tokens.tolist() == tokens
    # With what is left of a prompt comes its first step, which is not replayed.
    launched = answer.timing.prefix_computed > 0
    assert counted.replays - before == answer.timing.forwards - launched
    requests, wanted = among_others(name, speculation)
    before = counted.replays
    answers = engine.run_many(requests)
    assert [a.tokens.tolist() for a in answers] == wanted
    assert counted.replays > before
    if kind == "right":
        assert sum(a.counts.num_accepted_tokens for a in answers[::2]) > 0
    assert_no_leak(engine)
    counts = engine.schedulers["text"].graphs.token_counts
    assert name != "everything" or counts.both[1, 1:].any()


def test_paths_that_fork_are_moved(model, expected):
    """The right path lies behind wrong siblings, so that every step must move it."""
    prompt = prompts(8)[2]
    params, tokens, *_ = expected["warm", 2]
    engine = with_graphs(model, Counted(), SHAPES[3:])
    engine.drafters["table"] = TableDrafter("tree", {tuple(prompt.tolist()): tokens})
    scheduler = engine.schedulers["text"]
    moved = []
    keys = scheduler.runner.pool.keys
    commit = scheduler._commit

    def watched(group, outputs):
        moved.append(any(node != place for place, node in enumerate(outputs.paths().paths[0])))
        return commit(group, outputs)

    scheduler._commit = watched
    for _ in range(4):
        request = TextQuery(prompt, params, Speculation("table"))
        assert engine.run(request).tokens.tolist() == tokens
    assert sum(moved) > 2 and keys is scheduler.runner.pool.keys


def test_what_fits_no_bucket_steps_as_before(model, expected):
    """Too many texts, too many nodes, too deep, too many words: all answered, none replayed."""
    counted = Counted()
    engine = with_graphs(model, counted, (StepShape(4, 2, 1),))
    texts = {tuple(p.tolist()): expected["warm", n][1] for n, p in enumerate(prompts(8))}
    engine.drafters["table"] = TableDrafter("right", texts)
    requests = [
        TextQuery(p, expected["warm", n][0], Speculation("table")) for n, p in enumerate(prompts(8))
    ]
    answers = engine.run_many(requests)
    assert [a.tokens.tolist() for a in answers] == list(texts.values())
    words = tuple((n % 40, n % 7) for n in range(100))
    params = SamplingParams(temperature=0.9, seed=2, bad_words=words)
    tokens, *_ = plain(model, prompts(8)[0].tolist(), params)
    before = counted.replays
    assert engine.run(TextQuery(prompts(8)[0], params)).tokens.tolist() == tokens
    assert counted.replays == before
    # One draft node for one text fits: node 0, the draft, one for the other text, one to fill up.
    request = TextQuery(prompts(8)[1], expected["warm", 1][0], Speculation("table", num_tokens=1))
    assert engine.run(request).tokens.tolist() == expected["warm", 1][1]
    assert counted.replays > before


@pytest.mark.parametrize("rule", chosen(("rejection", "block", "typical"), "block"))
def test_other_rules_judge_chosen_drafts_in_a_record(rule, model):
    """Where no drafter draws there are no rows of probs, and their rules are recorded all the
    same: the text is that of launched steps.
    """
    counted, prompt, texts = Counted(), prompts(8)[2], []
    request = TextQuery(prompt, SamplingParams(1.0, max_tokens=9), Speculation("table", rule))
    for engine in (with_graphs(model, counted, SHAPES[1:2]), engine_for(model)):
        engine.drafters["table"] = TableDrafter("right", {tuple(prompt.tolist()): [1] * 40})
        texts.append(engine.run(request).tokens.tolist())
    assert texts[0] == texts[1] and counted.replays > 3


def test_preemption_keeps_rows_and_counts(model):
    """Preempted texts lose their row and their place among the counts, and get others."""
    engine = with_graphs(model, Counted(), SHAPES[2:], pages=30)
    scheduler = engine.schedulers["text"]
    requests = []
    for number, prompt in enumerate(prompts(12, seed=3, low=5, high=12)):
        params = SamplingParams(
            seed=number, max_tokens=20, temperature=1.1, presence_penalty=0.2, frequency_penalty=0.1
        )
        requests.append(TextQuery(prompt, params, Speculation("table"), priority=number % 3))
    wanted = undrafted(model, requests)
    texts = {tuple(r.prompt.tolist()): t for r, t in zip(requests, wanted, strict=True)}
    engine.drafters["table"] = TableDrafter("mixed", texts)
    futures, most = [engine.submit(request) for request in requests], 0
    while engine.step():
        most = max(most, len(scheduler.preempted))
    assert most > 0
    assert [future.result(0).tokens.tolist() for future in futures] == wanted
    assert_no_leak(engine)


@pytest.mark.slow
def test_packed_weights_are_replayed(expected, force_kernels):
    force_kernels("torch")
    model = drawn_model(1)
    pack_weights(model)
    counted = Counted()
    engine = with_graphs(model, counted)
    params, tokens, *_ = expected["everything", 4]
    assert engine.run(TextQuery(prompts(8)[4], params)).tokens.tolist() == tokens
    assert counted.replays == 11


def test_a_step_that_asks_the_device_cannot_be_recorded(model, monkeypatch):
    """The recorder would notice: the lazy walk of the CPU, a number read, a mask as an index."""
    from recserve.speculation.verifiers import sample

    def lazy(scored):
        return path.follow(scored, lambda nodes, trees: scored.target(nodes).argmax(-1))

    monkeypatch.setattr(sample, "_sample_everywhere", lazy)
    with pytest.raises(recorder.AsksTheDevice):
        with_graphs(model, Counted())
    x = torch.arange(4)
    for asks in (
        lambda: x.sum().item(),
        lambda: x[x > 2],
        lambda: x.nonzero(),
        lambda: torch.repeat_interleave(x, x),
        lambda: x.tolist(),
        lambda: torch.tensor([1, 2]),
        lambda: bool(x.any()),
    ):
        with pytest.raises(recorder.AsksTheDevice):
            recorder.record(asks)


def test_no_record_is_begun_without_time_or_memory(model):
    engine = with_graphs(model, Counted(), seconds=-1.0)
    assert engine.schedulers["text"].graphs.captured == []
    scheduler = engine_for(model).schedulers["text"]

    class Large(EagerRecorder):
        def __call__(self, step):
            self.bytes += 2 * 2**30
            return step

    limits = TextStepLimits(SHAPES, seconds=float("inf"), bytes=2 * 2**30)
    graphs = TextStepGraphs(scheduler.runner, scheduler.kv, model, limits, Large())
    assert [each.bytes for each in graphs.captured] == [2 * 2**30] * 2
    assert [made.bucket.name for made in graphs.captured] == ["2x1", "16x1"]
    wanted = engine.stats().unrecorded
    assert wanted[:2] == ["2x1", "16x1"] and graphs.missing == wanted[2:]


class OutOfResources(Exception):
    """As Triton's errors, which are no RuntimeErrors."""


@pytest.mark.parametrize("kind", [RuntimeError, OutOfResources])
def test_a_record_that_fails_leaves_an_engine_that_answers(kind, model, expected, caplog):
    def fails(step):
        raise kind("operation not permitted when stream is capturing")

    engine = with_graphs(model, Counted(fails))
    assert engine.schedulers["text"].graphs.captured == [] and "no graph of" in caplog.text
    params, tokens, *_ = expected["warm", 1]
    assert engine.run(TextQuery(prompts(8)[1], params)).tokens.tolist() == tokens


def test_graphs_are_refused_without_cuda(model):
    with pytest.raises(ValueError, match="CUDA device"):
        engine_for(model, graphs=True)
