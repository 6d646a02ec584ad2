"""Verdicts, guardrails and checks on made-up runs."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from recserve.load.comparison import (
    Criteria,
    SampleRatio,
    check_ratio,
    compare_arms,
    decide,
    percent,
)
from recserve.load.generator import Run
from recserve.load.measurements import SampleColumns, summarise
from tests.support.experiment_runs import SAMPLES, SLATE, made_run

NAMES = ("beam", "nezha")


def compared(columns, mode="blocks", overlaps=(), **criteria):
    return compare_arms(
        columns=columns,
        samples=SAMPLES,
        names=NAMES,
        treatment=1,
        mode=mode,
        criteria=Criteria(**criteria),
        overlaps=overlaps,
    )


@pytest.mark.parametrize(
    ("effect", "kind", "word", "mode"),
    [
        (-0.2, "better", "is faster than", "blocks"),
        (0.2, "worse", "is slower than", "paired"),
        (0.0, "unclear", "No", "blocks"),
    ],
)
def test_the_verdict_says_what_the_run_shows(mode, effect, kind, word):
    columns = made_run(mode, effect=effect, seed=3)
    found = compared(columns, mode, statistic="p50", ndcg_margin=1.0)
    assert found.kind == kind
    assert word in found.verdict and "p50 latency" in found.verdict
    (own,) = (e.relative for e in found.effects["latency"] if e.statistic == "p50")
    assert f"% interval {percent(own.low)} to {percent(own.high)}), " in found.verdict
    assert 30 <= found.num_blocks <= 200
    assert found.detectable < 0.2
    assert [effect.statistic for effect in found.effects["latency"]] == [
        "mean",
        "p50",
        "p90",
        "p99",
    ]


@pytest.mark.parametrize("shots", [80, 4000])
def test_what_describes_a_run_follows_from_its_blocks(shots):
    """The change that a run can find, and the length of a block, also for runs of few blocks."""
    columns = made_run(shots=shots)
    found = compared(columns, statistic="mean")
    (effect,) = (one for one in found.effects["latency"] if one.statistic == "mean")
    quantiles = stats.t.ppf([0.975, 0.9], found.num_blocks - 1)
    assert found.detectable == pytest.approx(np.exp(quantiles.sum() * effect.log_error) - 1)
    assert found.block_s == pytest.approx((shots - 1) / 100 / found.num_blocks, rel=1e-3)
    assert found.num_blocks == effect.num_blocks


def test_a_faster_arm_that_breaks_a_guardrail_is_not_better():
    columns = made_run("paired", effect=-0.2, changed=5)
    found = compared(columns, "paired", statistic="p50", k=10)
    guards = {guard.name: guard.outcome for guard in found.guardrails}
    assert guards["overlap of slates"] == "fail"
    assert found.kind == "do_not_ship"
    assert found.verdict.startswith("Do not ship nezha: quality. overlap of slates 0.5 ")
    assert "nezha is faster than beam in p50 latency" in found.verdict


def test_a_failed_guardrail_decides_even_if_no_latency_differs():
    """The walk of November 2026: both guardrails surely failed, and the badge said undecided."""
    found = compared(made_run("paired", changed=5, seed=3), "paired", statistic="p99", k=10)
    assert not found.effects["latency"][-1].relative.excludes_zero
    assert found.kind == "do_not_ship"
    assert {g.name for g in found.guardrails if g.outcome == "fail"} == {
        *("overlap of slates", "NDCG@10"),
    }
    assert "latency" not in found.verdict  # nothing is known of it


def test_a_faster_arm_is_not_better_before_its_guardrails_hold():
    found = compared(made_run(effect=-0.2), statistic="p50", ndcg_margin=1e-4)
    assert found.kind == "unclear"
    assert "is faster than" in found.verdict and "Not enough data" in found.verdict


def test_failed_requests_break_their_guardrail():
    found = compared(made_run(failed=0.05), statistic="p50")
    guard = next(guard for guard in found.guardrails if guard.name == "failed requests")
    assert guard.outcome == "fail" and guard.control == 0
    assert found.verdict.startswith("Do not ship nezha: errors. failed requests 0 to 0.0")


def test_slates_are_judged_against_the_next_item():
    found = compared(made_run("paired", changed=5), "paired", k=10, statistic="p50")
    guard = next(guard for guard in found.guardrails if guard.name == "NDCG@10")
    assert guard.outcome == "fail"
    same = compared(made_run("paired"), "paired", k=10, statistic="p50")
    guard = next(guard for guard in same.guardrails if guard.name == "NDCG@10")
    assert (guard.control, guard.outcome) == (guard.treatment, "pass")


def test_the_sequential_verdict_names_its_interval():
    found = compared(made_run(effect=0.3), statistic="p50", sequential=True)
    assert "valid at every look; decided after block" in found.verdict
    fixed = next(e for e in found.effects["latency"] if e.statistic == "p50").relative
    last = found.looks[-1].relative
    assert last.low < fixed.low
    assert f"% interval {percent(last.low)} to {percent(last.high)}, valid" in found.verdict


def test_a_skewed_split_is_not_valid():
    ratio = SampleRatio("requests", (700, 300), 1e-9, True)
    found = compared(made_run(), statistic="p50")
    effect = found.effects["latency"][1]
    kind, sentence = decide("a", "b", effect, found.looks, [], ratio, Criteria())
    assert kind == "invalid" and sentence.startswith("Not valid")


def test_ratios_count_requests_or_units():
    assert check_ratio(made_run(), 2, "blocks", None).counts == (2000, 2000)
    split = check_ratio(made_run("split"), 2, "split", None)
    assert (split.counted, split.counts, split.alarm) == ("units", (30, 30), False)


def test_units_that_stay_in_one_arm_are_counted_in_a_split():
    columns = made_run("split", seed=5)
    by_unit = compared(columns, "split", statistic="p50")
    assert by_unit.kind == "unclear"
    # The units of the arms have other next items, which is chance and no loss of quality.
    (guard,) = (guard for guard in by_unit.guardrails if guard.name.startswith("NDCG"))
    assert guard.outcome == "unclear"


def test_notes_say_what_limits_the_result():
    short = compared(made_run(shots=100), statistic="p99")
    assert any("99th percentile needs" in note for note in short.notes)
    paired = made_run("paired", shots=2000)
    warmed = np.where(paired.place == 1, paired.latency_ms * 0.5, paired.latency_ms)
    columns = SampleColumns(**{**vars(paired), "latency_ms": warmed})
    found = compared(columns, "paired", statistic="p50")
    assert found.order_effect.high < -0.3
    assert any("warms caches" in note for note in found.notes)


def test_timeouts_count_as_latencies_and_other_failures_do_not():
    columns = made_run(shots=200, failed=0.5)
    assert columns.failed.sum() > 20
    assert (columns.timed == ~columns.failed).all()
    late = [replace(one, error="timeout") if one.error else one for one in columns.exchanges]
    again = SampleColumns.of(Run(tuple(late), 2.0, 0.1, 3), SAMPLES)
    assert again.timed.all() and (again.failed == columns.failed).all()


def test_summaries_count_slates_and_items_that_do_not_exist():
    known = frozenset(SLATE)
    beam, nezha = summarise(made_run(changed=3), NAMES, SAMPLES, "items", known, k=11)
    assert (beam.items.illegal_share, nezha.items.illegal_share) == (0.0, pytest.approx(0.3))
    assert beam.items.short_share == 1.0 and beam.items.duplicate_share == 0.0
    assert beam.num_units == 60 and beam.versions == ["m1"]
    assert beam.server_ms.percentiles["p50"] == 5.0


def test_summaries_of_text_amortise_time_over_tokens():
    (one, _) = summarise(made_run(text=True), NAMES, SAMPLES, "text")
    drafting = one.text.drafting["all"]
    assert drafting.tokens_per_step == 3.0
    assert drafting.acceptance_rate == pytest.approx(2 / 3)
    assert drafting.share_of_time == pytest.approx(1.0)
    wanted = one.latency_ms.mean * 0.75 / 8
    assert one.text.tpot_ms.mean == pytest.approx(wanted, rel=0.01)
