"""The load-aware depth of drafts, on stated costs and acceptance, and in the engine."""

import itertools

import numpy as np
import pytest
import torch

from recserve.core.draft_policy import TRIAL_SHARE, Cost, DepthPolicy, best_option
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.draft_proposer import SIZES, DraftProposer, text_step_cost
from recserve.engine.engine_config import EngineConfig
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import Budget
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.grids import chosen, covering
from tests.support.text_engines import undrafted
from tests.support.text_plain import TableDrafter, drawn_model, plain

# 20 ms to read the weights, which is all that up to 32 nodes cost; then 0.5 ms for each.
ROOFLINE = Cost((1, 32, 64, 1024), (20.0, 20.0, 36.0, 516.0))
ARITHMETIC = Cost((1, 1000), (10.0, 10000.0))
FULL = 64  # levels of the largest budget


def chain(levels: int, budget: int = FULL) -> tuple[int, int, int]:
    """A chain that a text with this budget got."""
    return budget, levels, levels


def taught(
    cost: Cost, drafters: dict[str, tuple[float, int]], draft_ms: float = 0.0
) -> DepthPolicy:
    """A policy that knows its drafters: the chance of every level, the levels of a chain, and
    the milliseconds of a call per level and text.
    """
    policy = DepthPolicy(cost)
    for name, (chance, levels) in drafters.items():
        policy.depths({name: 1}, 1, 0)
        random = np.random.default_rng(0)
        for _ in range(2000):
            for together in (1, 2, 4):
                taken_ms = together * levels * draft_ms
                policy.record_drafts(name, [chain(levels)] * together, taken_ms)
            accepted = int((random.random(levels) < chance).cumprod().sum())
            policy.record(name).add(accepted, levels, accepted)
    for texts in (1, 2, 4, 8, 16, 32, 64, 128):
        policy.record_step(texts, texts, cost(texts))
        policy.record_step(texts, 2 * texts, cost(2 * texts))
    return policy


def depths_of(
    policy: DepthPolicy, counts: dict[str, int], levels: dict[str, int], prefill: int = 0
) -> dict[str, int]:
    """The plan, without trials."""
    policy._hold = policy._since_plain = 0
    for name in counts:
        policy.depth_record(name).spare_ms = 0.0
    found = policy.depths(counts, sum(counts.values()), prefill)
    return {name: min(depth, levels[name]) for name, depth in found.items()}


def rate(policy: DepthPolicy, cost: Cost, counts: dict[str, int], depths: dict[str, int]) -> float:
    """Tokens per millisecond of a step in which every text drafts a chain of this depth."""
    tokens = nodes = float(sum(counts.values()))
    drafting = 0.0
    for name, count in counts.items():
        stats, depth = policy.depth_record(name), depths[name]
        tokens += count * stats.gains()[depth]
        nodes += count * depth
        drafting += stats.drafting_ms(count)[depth]
    return tokens / (cost(nodes) + drafting)


@pytest.mark.parametrize(
    "draft_ms,cost,counts",
    covering(
        (0.0, 0.4),
        {
            "roofline": ROOFLINE,
            "early bend": Cost((1, 4, 8, 64), (10.0, 10.0, 14.0, 70.0)),
            "arithmetic": Cost((1, 64), (1.0, 64.0)),
            "free": Cost((1, 1024), (5.0, 5.0)),
        },
        ({"good": 1}, {"good": 1, "bad": 1}, {"good": 2, "bad": 1}, {"bad": 4, "good": 12}),
    ),
)
def test_no_other_depths_are_better(counts, cost, draft_ms):
    levels = {"good": 4, "bad": 3}
    policy = taught(cost, {"good": (0.8, 4), "bad": (0.35, 3)}, draft_ms)
    chosen = depths_of(policy, counts, levels)
    best = max(
        rate(policy, cost, counts, dict(zip(counts, depths, strict=True)))
        for depths in itertools.product(*(range(levels[name] + 1) for name in counts))
    )
    assert rate(policy, cost, counts, chosen) >= 0.97 * best


def test_drafts_shrink_as_the_load_grows_and_come_back():
    policy = taught(ROOFLINE, {"d": (0.7, 6)})
    rising = [depths_of(policy, {"d": n}, {"d": 6})["d"] for n in range(1, 129)]
    falling = [depths_of(policy, {"d": n}, {"d": 6})["d"] for n in range(128, 0, -1)]
    assert rising[0] == 6 and rising[-1] <= 1 and falling == rising[::-1]
    assert all(after <= before + 1 for before, after in itertools.pairwise(rising))
    for number, depth in enumerate(rising):
        counts = {"d": number + 1}
        of = [rate(policy, ROOFLINE, counts, {"d": own}) for own in (depth, 0, 6)]
        assert of[0] >= 0.98 * max(of)


def test_prompt_tokens_in_the_same_forward_shorten_drafts():
    policy = taught(ROOFLINE, {"d": (0.4, 6)})
    alone = depths_of(policy, {"d": 2}, {"d": 6})["d"]
    assert depths_of(policy, {"d": 2}, {"d": 6}, prefill=200)["d"] < alone


def test_every_drafter_is_tried_once_even_where_drafts_never_pay():
    """The first step measures plain decoding, the next one lets both unknown drafters try."""
    policy = DepthPolicy(ARITHMETIC)
    counts = {"left": 8, "right": 8}
    assert policy.depths(counts, 16, 0) == {"left": 0, "right": 0}
    policy.record_step(16, 16, ARITHMETIC(16))
    assert min(policy.depths(counts, 16, 0).values()) > 0
    assert policy.depths(counts, 16, 0) == {"left": 0, "right": 0}


def test_it_learns_while_it_serves():
    """A drafter that turns bad drafts in trials alone, and drafts again when it is good again.

    Cost by arithmetic, where a node that is accepted half of the time does not pay.
    """
    random = np.random.default_rng(1)
    cost = Cost((1, 1000), (10.0, 1009.0))
    policy = DepthPolicy(cost)
    used = []
    for step in range(3000):
        chance = 0.05 if 1000 <= step < 2000 else 0.9
        depth = min(policy.depths({"d": 1}, 1, 0)["d"], 4)
        used.append(depth)
        if depth:
            policy.record_drafts("d", [chain(depth, depth)], 0.0)
            accepted = int((random.random(depth) < chance).cumprod().sum())
            policy.record("d").add(accepted, depth, accepted)
        policy.record_step(1, 1 + depth, cost(1 + depth))
    before, bad, after = np.mean(used[500:1000]), np.mean(used[1500:2000]), np.mean(used[2800:])
    assert before > 3.5 and bad < 0.5 and after > 3.0


@pytest.mark.parametrize("count", [1, 3])
def test_trials_of_a_drafter_that_never_hits_take_a_hundredth_of_the_time(count):
    """A step takes 10 ms per node, a call of the drafter 4 ms."""
    policy = taught(ARITHMETIC, {"d": (0.0, 4)}, 1.0)
    lost_ms, trials, steps = 0.0, 0, 8000
    for _ in range(steps):
        depth = policy.depths({"d": count}, count, 0)["d"]
        step_ms = ARITHMETIC(count * (1 + depth))
        if depth:
            trials += 1
            lost_ms += 4.0 + step_ms - ARITHMETIC(count)
            policy.record_drafts("d", [chain(depth, depth)] * count, 4.0)
            for _ in range(count):
                policy.record("d").add(0, depth, 0)
        policy.record_step(count, count * (1 + depth), step_ms)
    share = lost_ms / (steps * ARITHMETIC(count) + lost_ms)
    assert trials > 5 and share <= 1.2 * TRIAL_SHARE


def test_a_drafter_that_finds_nothing_is_seldom_called():
    policy, called = DepthPolicy(ROOFLINE), 0
    for _ in range(400):
        depth = policy.depths({"d": 1}, 1, 0)["d"]
        if depth:
            called += 1
            policy.record_drafts("d", [chain(0, depth)], 5.0)
        policy.record_step(1, 1, 20.0)
    assert 1 < called < 80


def test_the_time_of_a_step_outside_the_network_counts():
    """Nodes are dear for a network alone, and cheap in a step that takes 50 ms more anyway. Nothing
    is drafted where any draft makes a step longer than what it gains.
    """
    cost = Cost((1, 101), (1.0, 81.0))
    policy = taught(cost, {"d": (0.6, 4)})
    assert depths_of(policy, {"d": 1}, {"d": 4}) == {"d": 0}
    for _ in range(100):
        policy.record_step(1, 1, 51.0)
        policy.record_step(1, 5, cost(5) + 50.0)
    assert depths_of(policy, {"d": 1}, {"d": 4}) == {"d": 4}
    for _ in range(100):
        policy.record_step(1, 5, cost(5) + 250.0)
    assert depths_of(policy, {"d": 1}, {"d": 4}) == {"d": 0}


def test_one_step_that_was_interrupted_changes_little():
    policy = DepthPolicy(ROOFLINE)
    for _ in range(32):
        policy.record_step(1, 1, 20.0)
    policy.record_step(1, 1, 2000.0)
    slope, shift = policy._step_ms(1, False)
    assert shift + slope * 20.0 <= 22.0


def test_budgets_stay_within_what_a_text_allows():
    policy = taught(ROOFLINE, {"d": (0.9, 4)})
    proposer = DraftProposer(policy, 64, torch.device("cpu"))
    most = Budget(64, 64)
    assert proposer._as_deep_as_pays("d", 3, Budget(2, 2)) == Budget(2, 2)
    assert proposer._as_deep_as_pays("d", 3, most) == Budget(3, 3)
    assert proposer._as_deep_as_pays("d", 16, most) == most
    assert proposer._as_deep_as_pays("d", 0, most) == Budget(0, 0)


def test_the_option_with_most_results_for_its_cost_is_chosen():
    assert best_option([0.0], [10.0], 1.0) == 0
    assert best_option([0.0, 0.5, 0.9], [10.0, 14.0, 16.0], 1.0) == 2
    assert best_option([0.0, 0.5, 0.9], [10.0, 14.0, 25.0], 1.0) == 1
    assert best_option([0.0, 0.5], [10.0, 14.0], 1.1) == 0
    assert best_option([0.0, 2.0], [10.0, 12.0], 1.0, base=8.0) == 1
    assert best_option([0.0, 2.0], [10.0, 13.0], 1.0, base=8.0) == 0


def test_expected_tokens_follow_from_the_frequencies():
    """Two thirds of the drafts keep one token, half of those a second one, of a depth of 3."""
    policy = DepthPolicy(ROOFLINE)
    stats = policy.depth_record("d")
    for number in range(6000):
        policy.record_drafts("d", [chain(3)], 3.0)
        policy.record("d").add((0, 1, 2)[number % 3], 3, (0, 1, 2)[number % 3])
    gains = stats.gains()
    assert gains[:4] == pytest.approx([0.0, 2 / 3, 1.0, 1.0], abs=0.05)
    assert gains[4] - gains[3] < 0.01
    assert stats.nodes()[3:5] == pytest.approx([3.0, 3.0], abs=0.05)
    assert stats.drafting_ms(1)[:5] == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])


class Counting(TableDrafter):
    """How often it was called."""

    calls = 0

    def propose(self, contexts, budgets):
        self.calls += 1
        return super().propose(contexts, budgets)


def test_a_drafter_without_a_budget_is_not_called():
    """It learns of every text once, and after that is called only where it may draft."""
    model = drawn_model(1)
    params = SamplingParams(temperature=0.0, max_tokens=60)
    prompt = tuple(range(1, 9))
    drafter = Counting("wrong", {prompt: plain(model, list(prompt), params)[0]})
    engine = build_engine(
        EngineModels(text=model, drafters={"wrong": drafter}),
        EngineConfig(page_size=4, load_aware=True, kv_bytes=2**20),
    )
    request = TextQuery(np.array(prompt), params, Speculation("wrong"))
    policy = taught(Cost((1, 1000), (1.0, 1e6)), {"wrong": (0.01, 3)})
    policy.record_step = lambda *_: None  # the stated costs hold, whatever a step takes here
    engine.schedulers["text"]._proposer.policy = policy
    answer = engine.run(request)
    assert len(answer.tokens) > 50
    assert 1 <= drafter.calls <= 3


def test_a_step_is_recorded_with_its_texts_and_nodes(monkeypatch):
    """Each text has a node of its own beside those of its draft; prompts are not recorded."""
    model, params = drawn_model(1), SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [(1, 2, 3), (4, 5, 6, 7)]
    known = {prompt: plain(model, list(prompt), params)[0] for prompt in prompts}
    engine = build_engine(
        EngineModels(text=model, drafters={"table": TableDrafter("right", known)}),
        EngineConfig(page_size=4, load_aware=True, kv_bytes=2**20),
    )
    policy = taught(Cost((1, 1000), (1.0, 1.0)), {"table": (0.9, 3)})
    recorded = []
    monkeypatch.setattr(policy, "record_step", lambda *step: recorded.append(step))
    engine.schedulers["text"]._proposer.policy = policy
    speculation = Speculation("table", num_tokens=3)
    answers = engine.run_many([TextQuery(np.array(p), params, speculation) for p in prompts])
    assert all(ms >= 0 for *_, ms in recorded)
    assert (2, 8) in {step[:2] for step in recorded}
    drafted = sum(answer.counts.num_draft_tokens for answer in answers)
    assert drafted - 6 <= sum(nodes - texts for texts, nodes, _ in recorded) <= drafted


@torch.inference_mode()
def test_the_cost_of_a_text_step_is_measured():
    cost = text_step_cost(drawn_model(0))
    assert cost.sizes == SIZES and all(ms > 0 for ms in cost.milliseconds)


@pytest.mark.parametrize("temperature", chosen((0.0, 1.3), "1.3"))
def test_text_stays_the_same(temperature):
    """Mixed drafts in a mixed load whose depths change: the text of plain decoding."""
    model = drawn_model(1)
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 40, random.integers(1, 20)) for _ in range(15)]
    requests = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=5 + number)
        name = ("table", "none", "wrong")[number % 3]
        requests.append(TextQuery(prompt, params, Speculation(name)))
    wanted = undrafted(model, requests)
    known = {tuple(r.prompt.tolist()): t for r, t in zip(requests, wanted, strict=True)}
    drafters = {"table": TableDrafter("mixed", known), "wrong": TableDrafter("wrong", known)}
    config = EngineConfig(page_size=4, load_aware=True, max_running=10, kv_bytes=2**20)
    engine = build_engine(EngineModels(text=model, drafters=drafters), config)
    answers = engine.run_many(requests)
    assert [a.tokens.tolist() for a in answers] == wanted
    assert sum(a.counts.num_accepted_tokens for a in answers) > 0
