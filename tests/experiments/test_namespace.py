"""Experiments that share their units: those outside a namespace have no arm."""

from dataclasses import replace

from recserve.experiments.assignment import ArmSplit, BucketRange, Namespace

UNITS = [f"user {number}" for number in range(400)]


def test_only_units_of_the_namespace_have_an_arm_and_it_is_the_same_one():
    split = ArmSplit.even("seed", ["a", "b"])
    lower, upper = (
        replace(split, namespace=Namespace("shared", BucketRange(start=low, end=low + 0.5)))
        for low in (0.0, 0.5)
    )
    for unit in UNITS:
        whole, one, two = (each.assign(unit) for each in (split, lower, upper))
        assert whole.arm in ("a", "b") and whole.bucket == one.bucket == two.bucket
        assert (one.arm is None) != (two.arm is None), "each unit is in one half"
        assert (one.arm or two.arm) == whole.arm
        assert (one.arm is not None) == lower.namespace.includes(unit)
    shares = sum(lower.assign(unit).arm is not None for unit in UNITS) / len(UNITS)
    assert 0.4 < shares < 0.6
