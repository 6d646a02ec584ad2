"""Verdicts on clicks: what an experiment says, what counts, and what survives a restart."""

import errno
import itertools
import os
import random
import shutil
import threading
import time

import pytest

from recserve.experiments.experiment import Experiment
from recserve.experiments.saved_counts import SavedCounts
from recserve.experiments.settings import parse_experiments
from recserve.experiments.tallies import MAX_SEEN, ArmResult, SeenEvents
from recserve.experiments.verdict import duration
from recserve.schemas.experiments import ExperimentNotSaved
from recserve.schemas.items import InvalidRequest

DAY_S = 86_400.0

RANK_ARMS = [{"name": "control"}, {"name": "rpg", "fields": {"scorer": "likelihood"}}]
NONE = {"control": 0.0, "rpg": 0.0}  # clicks


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def experiment(clock=None, **changes):
    plain = {
        "name": "fast",
        "use": "recommend",
        "arms": [{"name": "control"}, {"name": "rpg", "fields": {"strategy": "rpg"}}],
    }
    (settings,) = parse_experiments([{**plain, **changes}])
    return Experiment(settings, clock or Clock())


def answer(one, user, seconds=0.01, **result):
    """Records an answer for a user and returns the name of the arm."""
    name = one.split.assign(user).arm
    one.see(user, name)
    one.record(one.arm(name), ArmResult(seconds, **result))
    one.count_answer([name], user)
    return name


def traffic(one, clicks, users=500, requests=1000, seed=0, step=60.0, seconds=lambda arm: 0.01):
    """Sends requests of users; `clicks` has the probability of a click per arm and item."""
    drawn = random.Random(seed)
    for request in range(requests):
        one._clock.now += step
        user = f"user-{drawn.randrange(users)}"
        arm = one.split.assign(user).arm
        answer(one, user, seconds(arm))
        for item in range(5):
            if drawn.random() < clicks[arm]:
                one.count_event(arm, user, "click", f"{seed}-{request} {item}")


def verdict(one):
    return one.describe().arms[1].verdict


def test_an_arm_that_is_faster_and_halves_the_clicks_is_not_shipped():
    """The walk of November 2026: 1,000 requests of 500 users, 212 clicks against 103."""
    one = experiment()
    latency = {"control": 0.032, "rpg": 0.010}
    traffic(one, {"control": 0.0848, "rpg": 0.0412}, seconds=latency.get)
    control, rpg = one.describe().arms
    assert control.p99_ms > 3 * rpg.p99_ms
    clicks = [arm.goals[0].events for arm in (control, rpg)]
    assert 180 < clicks[0] < 260 and 80 < clicks[1] < 130
    assert control.verdict is None and control.goals[0].change is None
    assert rpg.verdict.kind == "keep_control"
    assert rpg.verdict.text.startswith("keep control: clicks fell by ")
    assert {each.result for each in rpg.verdict.guardrails} == {"holds"}
    goal = rpg.goals[0]
    assert goal.change_low < goal.change < goal.change_high < 0
    assert goal.rate == pytest.approx(clicks[1] / rpg.answers)


def test_more_clicks_are_shipped_unless_a_guardrail_fails():
    clicks = {"control": 0.1, "rpg": 0.2}
    better = experiment()
    traffic(better, clicks, requests=2000)
    assert verdict(better).kind == "ship"
    assert verdict(better).text.startswith("ship rpg: clicks rose by ")
    slow = experiment(guard=None)  # it does not fall back, and is judged all the same
    traffic(slow, clicks, requests=2000, step=0.1, seconds={"control": 0.01, "rpg": 0.1}.get)
    assert verdict(slow).text == "keep control: p99 latency rose"
    for field, words in (("failed", "errors rose"), ("empty", "empty answers rose")):
        worse = experiment(guard=None)
        traffic(worse, clicks, requests=2000)
        for _ in range(500):
            worse.record(worse.arms[1], ArmResult(None, **{field: True}))
        assert verdict(worse).kind == "keep_control"
        assert verdict(worse).text == f"keep control: {words}"


def test_an_arm_that_fell_back_is_not_shipped():
    one = experiment(guard={"window_s": 60, "p99_factor": 1.5})
    traffic(one, {"control": 0.1, "rpg": 0.3}, requests=2000)
    traffic(
        one,
        {"control": 0.1, "rpg": 0.3},
        seed=1,
        step=0.05,
        seconds={"control": 0.01, "rpg": 0.1}.get,
    )
    assert one.status == "fallen_back"
    assert verdict(one).kind == "keep_control"
    assert verdict(one).text.startswith("keep control: it fell back, p99 ")
    one.start()
    assert "fell back" not in verdict(one).text


def test_equal_arms_are_not_yet_judged_and_the_days_that_are_left_are_said():
    one = experiment(smallest_effect=0.05)
    traffic(one, {"control": 0.1, "rpg": 0.1}, requests=1500)
    first = verdict(one)
    assert first.kind == "not_yet" and first.text.startswith("not yet: ")
    assert "at this traffic to see a change of 5 % in clicks" in first.text
    ran = one._clock.now / DAY_S
    traffic(one, {"control": 0.1, "rpg": 0.1}, requests=1500, seed=1)
    assert verdict(one).days == pytest.approx(first.days - ran, rel=0.3)
    one.stop()
    one._clock.now += 100 * DAY_S  # a stop is no traffic
    assert verdict(one).days == pytest.approx(first.days - ran, rel=0.3)


def test_arms_that_surely_differ_by_little_are_told_apart_from_unknown_ones():
    one = experiment(smallest_effect=1.0)
    traffic(one, {"control": 0.2, "rpg": 0.2}, requests=3000)
    assert verdict(one).kind == "no_difference"
    assert "differ by less than 100 %" in verdict(one).text


def test_what_is_missing_is_said():
    one = experiment()
    assert verdict(one).text == (
        "not yet: no clicks; send events of type click with the attribution_token of the answer"
    )
    arm = answer(one, "anna")
    one.count_event(arm, "anna", "event", "a")
    assert "(1 attributed events are of other types, see goals)" in verdict(one).text
    for number in range(60):
        one.count_event(arm, "anna", "click", str(number))
        if number == 30:
            assert verdict(one).text == "not yet: 31 of at least 50 clicks"
    assert verdict(one).text == "not yet: 0 users in an arm, at least 30 are needed"


def test_an_event_counts_once_per_answer_item_and_type():
    one = experiment(goals=["purchase", "click"])
    arm = answer(one, "anna")
    for _, event_type in itertools.product(range(3), ("click", "purchase", "view")):
        one.count_event(arm, "anna", event_type, "token item")
    one.count_event(arm, "anna", "click", "token other")
    one.count_event("gone", "anna", "click", "token third")  # an arm of earlier settings
    found = next(each for each in one.describe().arms if each.name == arm)
    assert [(goal.type, goal.events) for goal in found.goals] == [("purchase", 1), ("click", 2)]
    assert found.answers == 1


def test_a_server_remembers_a_bounded_number_of_events():
    seen = SeenEvents()
    assert all(seen.add(str(number)) for number in range(MAX_SEEN + 10))
    assert len(seen.keys()) == MAX_SEEN and not seen.add(str(MAX_SEEN)) and seen.add("0")


def test_three_arms_have_a_verdict_each():
    arms = [{"name": name} for name in ("control", "a", "b")]
    one = experiment(arms=arms)
    traffic(one, {"control": 0.1, "a": 0.1, "b": 0.02}, requests=3000)
    assert [arm.verdict and arm.verdict.kind for arm in one.describe().arms] == [
        *(None, "not_yet", "keep_control"),
    ]


def test_users_that_are_not_divided_by_the_weights_make_it_invalid():
    one = experiment()
    for user in range(400):
        if one.split.assign(f"user-{user}").arm == "control" or user % 3:
            answer(one, f"user-{user}")
    assert verdict(one).kind == "invalid" and "not valid: users" in verdict(one).text


CONTROL_ANSWERS = "every answer is of control, so clicks say nothing about rpg"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "paired"}, CONTROL_ANSWERS),
        ({"mode": "shadow"}, CONTROL_ANSWERS),
        ({"mode": "paired", "use": "rank", "arms": RANK_ARMS}, CONTROL_ANSWERS),
        ({"use": "text", "arms": [{"name": "a"}, {"name": "b"}]}, "for recommend and rank"),
    ],
)
def test_modes_without_clicks_per_arm_say_why(changes, reason):
    """Whatever has happened: an arm never waits for clicks that cannot come."""
    one = experiment(**changes)
    for _ in range(2):
        control, arm = one.describe().arms
        assert control.goals == [] == arm.goals and control.verdict is None
        assert arm.verdict.kind == "no_goal" and arm.verdict.days is None
        assert arm.verdict.text.startswith("nothing to judge: ") and reason in arm.verdict.text
        one.count_event(control.name, "ann", "click", "answer item")
        for each in one.arms:
            one.record(each, ArmResult(0.01))
    with pytest.raises(InvalidRequest, match="goals: expected none for .* got click, like"):
        experiment(**changes, goals=["click", "like"])


@pytest.mark.parametrize(
    ("clicks", "kind", "words"),
    [
        ((0.1, 0.2), "ship", "ship rpg: its items got "),
        ((0.2, 0.1), "keep_control", "keep control: items of rpg got "),
        ((0.1, 0.1), "not_yet", "not yet: "),
    ],
)
def test_the_teams_of_interleaved_slates_are_compared(clicks, kind, words):
    one, drawn = experiment(mode="interleaved"), random.Random(1)
    assert verdict(one).text.startswith("not yet: no clicks; send events of type click with the")
    for request in range(1500):
        one._clock.now += 60
        user = f"user-{drawn.randrange(500)}"
        one.count_answer(["control", "rpg"], user)
        for arm, chance in zip(one.arms, clicks, strict=True):
            one.record(arm, ArmResult(0.01))
            for item in range(5):
                if drawn.random() < chance:
                    one.count_event(arm.name, user, "click", f"{request} {arm.name} {item}")
    assert verdict(one).kind == kind and verdict(one).text.startswith(words)
    control, arm = one.describe().arms
    assert control.answers == arm.answers == 1500
    assert 0.8 < control.goals[0].rate / (5 * clicks[0]) < 1.2
    again = experiment(mode="interleaved")
    again.restore(one.state())
    assert again.describe().arms[1].goals == arm.goals


def test_arms_that_are_interleaved_have_no_diversity():
    arms = [{"name": "control"}, {"name": "b", "fields": {"diversity.category": 2}}]
    with pytest.raises(InvalidRequest, match=r"arms\[1\].fields.diversity: expected none in mode"):
        experiment(mode="interleaved", arms=arms)


def test_goals_are_different():
    with pytest.raises(InvalidRequest, match="expected different types, got click, click"):
        experiment(goals=["click", "click"])


def test_the_first_verdict_stays_beside_a_later_one_that_says_less(tmp_path):
    """Looks come from people and from the thread that saves; a crash follows at once."""
    drawn, one = random.Random(3), experiment()
    store = SavedCounts(tmp_path / "counts", [one])
    clicks = {"control": 0.1, "rpg": 0.05}
    for part in range(40):
        traffic(one, clicks, requests=100, seed=part)
        looks = drawn.choice([Experiment.describe, Experiment.save])
        looks(one)
        if one._first_verdicts:
            break
    present = verdict(one)
    again = after_a_crash(tmp_path / "counts", tmp_path / "copy", guard=None)
    for each in (one, again):
        control, arm = each.describe().arms
        first = arm.first_verdict
        assert control.first_verdict is None
        assert (first.kind, first.text) == ("keep_control", present.text)
        assert (first.answers, first.control_answers) == (arm.answers, control.answers)
        assert (first.events, first.control_events) == (
            *(arm.goals[0].events, control.goals[0].events),
        )
    traffic(one, {"control": 0.02, "rpg": 0.2}, requests=300, seed="more")
    assert verdict(one).kind != "keep_control"  # the present verdict says something else
    assert one.describe().arms[1].first_verdict == first
    again.stop()
    again.start()
    assert again.describe().arms[1].first_verdict == first
    store.close()


def test_a_failing_guardrail_is_no_first_verdict():
    one = experiment(guard=GUARD)
    fall_back(one)
    assert verdict(one).kind == "keep_control"
    one.start()
    assert one.describe().arms[1].first_verdict is None


@pytest.mark.parametrize(
    ("lost", "warns", "kind"),
    [(0.0, False, "not_yet"), (0.15, True, "not_yet"), (0.4, True, "invalid")],
)
def test_users_that_are_hardly_divided_by_the_weights_are_a_warning(lost, warns, kind):
    one, drawn = experiment(), random.Random(11)
    for number in range(3000):
        user = f"user-{number}"
        if one.split.assign(user).arm == "control" or drawn.random() >= lost:
            answer(one, user)
    found = one.describe()
    assert (found.warning is not None) == warns == (found.sample_ratio_p < 1e-3)
    assert verdict(one).kind == kind and (kind == "invalid") == (found.sample_ratio_p < 1e-5)
    if warns:
        counts = ", ".join(f"{arm.users:,}" for arm in found.arms)
        assert f"({counts} users, p = " in found.warning
    assert sum(arm.users for arm in found.arms) <= 3000


def test_counts_survive_a_restart(tmp_path):
    one = experiment()
    first = SavedCounts(tmp_path, [one])
    first.start()
    traffic(one, {"control": 0.1, "rpg": 0.05})
    before = one.describe()
    first.close()
    again = experiment(coverage=0.9, smallest_effect=0.1)
    second = SavedCounts(tmp_path, [again])
    after = again.describe()
    for old, new in zip(before.arms, after.arms, strict=True):
        assert (old.goals, old.answers, old.requests) == (new.goals, new.answers, new.requests)
    assert before.arms[1].verdict.days == after.arms[1].verdict.days
    assert again._seen.keys() == one._seen.keys()  # a retry after the restart does not count
    other = experiment(coverage=0.9)
    third = SavedCounts(tmp_path, [other])  # the folder belongs to the second one
    assert other.describe().arms[0].requests == 0
    for each in (second, third):
        each.close()


def fall_back(one):
    """Lets the treatment fail until the guard has decided, and waits for its write."""
    for request in range(40):
        one._clock.now += 1
        for arm in one.arms:
            one.record(arm, ArmResult(0.01, failed=arm.name == "rpg" and request > 1))
    end = time.monotonic() + 30
    while one.status == "running" and time.monotonic() < end:
        time.sleep(0.001)


GUARD = {"window_s": 86400, "min_requests": 10}


def after_a_crash(folder, copy, guard=GUARD):
    """Returns the experiment of a process that starts with what lies on the disk now."""
    shutil.copytree(folder, copy)
    again = experiment(guard=guard)
    SavedCounts(copy, [again]).close()
    return again


def test_a_crash_loses_no_stop_start_or_fall_back(tmp_path):
    one, drawn = experiment(guard=GUARD), random.Random(5)
    store = SavedCounts(tmp_path / "counts", [one])  # nothing writes every ten seconds
    changes = [Experiment.stop, fall_back, Experiment.start]
    changes += [drawn.choice(changes) for _ in range(12)]
    statuses = set()
    for number, change in enumerate(changes):
        change(one)
        assert one.durable
        again = after_a_crash(tmp_path / "counts", tmp_path / str(number))
        assert (again.status, again.reason) == (one.status, one.reason)
        if one.status == "fallen_back":
            assert verdict(again).text == verdict(one).text
        statuses.add(again.status)
    assert statuses == {"stopped", "running", "fallen_back"}
    store.close()


@pytest.mark.parametrize("change", [Experiment.stop, Experiment.start, fall_back])
def test_a_disk_that_refuses_the_state_leaves_the_safe_side(tmp_path, change):
    """The arm gets no further requests, and nobody is told that a restart keeps that."""
    one = experiment(guard=GUARD)
    store = SavedCounts(tmp_path, [one])
    if change is Experiment.start:
        one.stop()
    write, one.keep = one.keep, broken
    if change is fall_back:
        change(one)
    else:
        with pytest.raises(ExperimentNotSaved, match="cannot be written .No space left"):
            change(one)
    assert one.status != "running" and not one.describe().durable
    one.keep = write
    one.stop()
    assert one.describe().durable
    store.close()


def broken(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_stop_wins_over_a_start_that_is_being_written():
    one, inside, go = experiment(), threading.Event(), threading.Event()
    one.stop()

    def slow(state):
        inside.set()
        go.wait(30)
        states.append(state.status)

    states, one.keep = [], slow
    start = threading.Thread(target=one.start)
    start.start()
    inside.wait(30)
    stop = threading.Thread(target=one.stop)
    stop.start()
    go.set()
    for each in (start, stop):
        each.join()
    assert (states, one.status) == (["running", "stopped"], "stopped")


def test_a_new_start_judges_the_guardrails_anew(tmp_path):
    """The totals are shown, but a repaired arm is not held to its failures from before."""
    one = experiment(guard={"window_s": 3600, "min_requests": 50})
    for user in range(2000):
        if one.status == "running":
            name = one.split.assign(f"user-{user}").arm
            answer(one, f"user-{user}", failed=name == "rpg")
        one._clock.now += 10
    assert one.status == "fallen_back"
    failed = one.describe().arms[1].errors
    one.start()
    traffic(one, NONE, requests=3000)
    assert one.describe().arms[1].errors == failed > 10
    results = [each.result for each in verdict(one).guardrails if each.name == "errors"]
    assert results == ["holds"] and "errors rose" not in verdict(one).text
    store = SavedCounts(tmp_path, [one])
    store.start()
    store.close()
    again = experiment(guard={"window_s": 3600, "min_requests": 50})
    SavedCounts(tmp_path, [again]).close()
    assert "errors rose" not in verdict(again).text


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": "2"},
        {"goals": ["purchase"]},
        {"arms": [{"name": "control", "weight": 0.4}, {"name": "rpg", "weight": 0.6}]},
        {"arms": [{"name": "control"}, {"name": "rpg", "fields": {"strategy": "beam"}}]},
        {"arms": [{"name": "control"}, {"name": "beam", "fields": {"strategy": "rpg"}}]},
    ],
)
def test_counts_of_other_settings_are_set_aside(tmp_path, changes, caplog):
    one = experiment()
    first = SavedCounts(tmp_path, [one])
    first.start()
    answer(one, "anna")
    first.close()
    for number, settings in enumerate((changes, {})):
        saved = (tmp_path / "fast.counts").read_bytes()
        other = experiment(**settings)
        counts = SavedCounts(tmp_path, [other])
        counts.start()
        counts.close()
        assert sum(arm.requests for arm in other.describe().arms) == 0
        assert "experiment fast counts from zero" in caplog.text
        assert (tmp_path / f"fast.counts.old{number + 1 if number else ''}").read_bytes() == saved


@pytest.mark.parametrize(
    ("days", "words"),
    [
        (0.0, "1 more minute"),
        (0.05, "72 more minutes"),
        (0.5, "12 more hours"),
        (1.5, "36 more hours"),
        (2.5, "3 more days"),
        (400, "more than a year"),
    ],
)
def test_times_are_said_in_their_unit(days, words):
    assert duration(days) == words
