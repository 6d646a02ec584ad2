"""Arms, and which request goes to which of them."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from recserve.experiments.assignment import ArmSplit
from recserve.load.datasets import Sample
from recserve.load.generator import Arm, Design, make_plan, parse_arm, sample_order
from recserve.load.targets import find_target

SAMPLES = [Sample(unit=f"u{n}", history=("a",)) for n in range(50)]
ARMS = [Arm("a", "http://one"), Arm("b", "http://two", {"strategy": "beam", "k": 5})]


def plan(mode, size=400, seed="7"):
    return make_plan(
        samples=SAMPLES,
        arms=ARMS,
        target=find_target("recommend"),
        times=np.arange(size) / 10,
        design=Design(mode=mode, seed=seed),
        fields={"k": 20},
    )


@pytest.mark.parametrize("text", ["a", "={}", "a={", "a=[1]"])
def test_other_arms_are_refused(text):
    with pytest.raises(ValueError, match="arm"):
        parse_arm(text, "http://h")


def test_blocks_hold_each_arm_equally_often_in_drawn_order():
    arms = [shot.calls[0].arm for shot in plan("blocks")]
    groups = [tuple(arms[n : n + 4]) for n in range(0, 400, 4)]
    assert all(sorted(group) == [0, 0, 1, 1] for group in groups)
    assert len(set(groups)) == 6


def test_pairs_go_to_both_arms_in_drawn_order():
    shots = plan("paired")
    orders = Counter(tuple(call.arm for call in shot.calls) for shot in shots)
    assert set(orders) == {(0, 1), (1, 0)}
    assert 140 < orders[0, 1] < 260
    assert all(shot.calls[0].sample == shot.calls[1].sample for shot in shots)


def test_a_split_gives_each_unit_the_arm_of_its_hash():
    split = ArmSplit.even("7", ["a", "b"])
    for shot in plan("split"):
        (call,) = shot.calls
        assert "ab"[call.arm] == split.assign(SAMPLES[call.sample].unit).arm


def test_requests_hold_the_common_fields_and_those_of_the_arm():
    bodies = {}
    for shot in plan("paired", size=1):
        for call in shot.calls:
            bodies[call.url] = msgspec.json.decode(call.body)
    assert bodies["http://one/v1/recommend"]["k"] == 20
    assert bodies["http://two/v1/recommend"]["k"] == 5
    assert bodies["http://two/v1/recommend"]["strategy"] == "beam"


def test_every_sample_is_asked_once_before_any_is_asked_again():
    order = sample_order(50, 120, "s")
    assert sorted(order[:50]) == sorted(order[50:100]) == list(range(50))
    assert (order == sample_order(50, 120, "s")).all()
    assert (order != sample_order(50, 120, "t")).any()
