"""Assignment: GrowthBook's published vectors, uniformity, independence, coverage."""

import numpy as np
import pytest
from growthbook import core as growthbook
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from recserve.experiments.assignment import (
    BUCKETS,
    ArmSplit,
    BucketRange,
    Namespace,
    bucket_ranges,
    choose_range,
    fnv1a_32,
    hash_v2,
)

# Test vectors of GrowthBook's SDK specification 0.7.1 (cases.json): hash, getBucketRange,
# chooseVariation, inNamespace.
HASHES = [
    ("seed", "a", 0.0505),
    ("seed", "b", 0.2696),
    ("foo", "ab", 0.2575),
    ("foo", "def", 0.2019),
    ("89123klj", "8952klfjas09ujkasdf", 0.124),
    ("90850943850283058242805", "123", 0.7516),
    ("()**(%$##$%#$#", '___)((*":&', 0.0128),
]
RANGES = [
    (2, 1, None, [(0, 0.5), (0.5, 1)]),
    (2, 0.5, None, [(0, 0.25), (0.5, 0.75)]),
    (2, 0, None, [(0, 0), (0.5, 0.5)]),
    (4, 1, None, [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]),
    (2, 1, [0.4, 0.6], [(0, 0.4), (0.4, 1)]),
    (3, 1, [0.2, 0.3, 0.5], [(0, 0.2), (0.2, 0.5), (0.5, 1)]),
    (3, 0.2, [0.2, 0.3, 0.5], [(0, 0.04), (0.2, 0.26), (0.5, 0.6)]),
    (2, -0.2, None, [(0, 0), (0.5, 0.5)]),
    (2, 1.5, None, [(0, 0.5), (0.5, 1)]),
    (2, 1, [0.4, 0.1], [(0, 0.5), (0.5, 1)]),
    (2, 1, [0.7, 0.6], [(0, 0.5), (0.5, 1)]),
    (4, 1, [0.4, 0.4, 0.2], [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]),
    (2, 1, [0.4, 0.5999], [(0, 0.4), (0.4, 0.9999)]),
]
HALVES = [(0, 0.5), (0.5, 1)]
QUARTERS = [(0, 0.25), (0.5, 0.75)]
CHOICES = [
    (0.2, HALVES, 0),
    (0.4, HALVES, 0),
    (0.6, HALVES, 1),
    (0.8, HALVES, 1),
    (0, HALVES, 0),
    (0.5, HALVES, 1),
    (0.2, QUARTERS, 0),
    (0.4, QUARTERS, None),
    (0.6, QUARTERS, 1),
    (0.8, QUARTERS, None),
    (0.25, QUARTERS, None),
    (0.5, QUARTERS, 1),
    (0.5, [(0, 0.5), (0.5, 0.5), (0.5, 1)], 2),
]
NAMESPACES = [
    ("1", "namespace1", 0, 0.4, False),
    ("1", "namespace1", 0.4, 1, True),
    ("1", "namespace2", 0, 0.4, False),
    ("1", "namespace2", 0.4, 1, True),
    ("2", "namespace1", 0, 0.4, False),
    ("2", "namespace1", 0.4, 1, True),
    ("2", "namespace2", 0, 0.4, False),
    ("2", "namespace2", 0.4, 1, True),
    ("3", "namespace1", 0, 0.4, False),
    ("3", "namespace1", 0.4, 1, True),
    ("3", "namespace2", 0, 0.4, True),
    ("3", "namespace2", 0.4, 1, False),
    ("4", "namespace1", 0, 0.4, False),
    ("4", "namespace1", 0.4, 1, True),
    ("4", "namespace2", 0, 0.4, True),
    ("4", "namespace2", 0.4, 1, False),
]

# Seed, value, FNV-1a of the value, hash version 2, hash version 1. Computed by the function
# `hashFnv32a` of GrowthBook's JavaScript SDK (src/util.ts) in Node.
BEYOND_ASCII = [
    ("seed", "é", 1812687940, 0.8663, 0.467),
    ("seed", "用户", 3303804768, 0.536, 0.551),
    ("größe", "user-ü", 2857670243, 0.9187, 0.414),
    ("экс", "пользователь", 2238000502, 0.6637, 0.686),
    ("seed", "\uffff", 2041487694, 0.1646, 0.465),
    ("seed", "😀", 3409036472, 0.4346, 0.895),
    ("s", "a😀b", 2412414209, 0.5656, 0.348),
    ("s", "𝒳𝒴", 1510457232, 0.255, 0.535),
    ("s", "👩\u200d👩\u200d👧", 3655870623, 0.8964, 0.81),
    ("exp", "\ud83d", 931276136, 0.0472, 0.889),
]
ANY_TEXT = st.text(st.characters(), max_size=12)
BASIC_PLANE = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=()), max_size=12)


@pytest.mark.parametrize(("seed", "value", "expected"), HASHES)
def test_hashes_are_those_of_growthbook(seed, value, expected):
    assert hash_v2(seed, value) == expected


@pytest.mark.parametrize(("arms", "coverage", "weights", "expected"), RANGES)
def test_bucket_ranges_are_those_of_growthbook(arms, coverage, weights, expected):
    found = [(one.start, one.end) for one in bucket_ranges(arms, coverage, weights)]
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("value", "ranges", "expected"), CHOICES)
def test_the_chosen_range_is_that_of_growthbook(value, ranges, expected):
    assert choose_range(value, [BucketRange(*one) for one in ranges]) == expected


@pytest.mark.parametrize(("unit", "name", "start", "end", "expected"), NAMESPACES)
def test_namespaces_are_those_of_growthbook(unit, name, start, end, expected):
    assert Namespace(name, BucketRange(start, end)).includes(unit) is expected


def test_fnv_equals_the_published_values():
    """Test values of the FNV reference page."""
    assert fnv1a_32("") == 0x811C9DC5
    assert fnv1a_32("a") == 0xE40C292C
    assert fnv1a_32("foobar") == 0xBF9CF968


@pytest.mark.parametrize(("seed", "value", "fnv", "second", "first"), BEYOND_ASCII)
def test_text_beyond_ascii_hashes_as_in_javascript(seed, value, fnv, second, first):
    assert fnv1a_32(value) == fnv
    assert hash_v2(seed, value) == second
    assert Namespace(seed, BucketRange(first, first + 0.0005)).includes(value)


@given(seed=BASIC_PLANE, value=BASIC_PLANE)
@settings(max_examples=200, deadline=None)
def test_drawn_texts_hash_as_in_growthbooks_python_package(seed, value):
    """Within the basic plane, code points and code units agree, so any release of it will do."""
    assert hash_v2(seed, value) == growthbook.gbhash(seed, value, 2)
    expected = growthbook.gbhash(f"__{seed}", value, 1)
    assert expected is not None
    assert Namespace(seed, BucketRange(expected, expected + 0.0005)).includes(value)


@given(text=ANY_TEXT)
@settings(max_examples=200, deadline=None)
def test_the_hash_is_over_utf16_code_units(text):
    units: list[int] = []
    for point in map(ord, text):
        if point <= 0xFFFF:
            units.append(point)
        else:
            high, low = divmod(point - 0x10000, 0x400)
            units += [0xD800 + high, 0xDC00 + low]
    expected = 2166136261
    for unit in units:
        expected = (expected ^ unit) * 16777619 % 2**32
    assert fnv1a_32(text) == expected


def test_a_unit_always_gets_the_same_arm_and_a_higher_coverage_moves_nobody():
    narrow = ArmSplit.even("e", ("a", "b"), coverage=0.3)
    wide = ArmSplit.even("e", ("a", "b"), coverage=0.9)
    for number in range(2000):
        unit = f"user-{number}"
        first = narrow.assign(unit)
        assert first == narrow.assign(unit)
        if first.arm is not None:
            assert wide.assign(unit) == first


def test_buckets_are_uniform_and_independent_of_another_seed():
    """Chi-square over 100 groups of 100 buckets and over the 2 x 2 table; p > 0.001 each."""
    units = [str(number) for number in range(40_000)]
    one = np.array([round(hash_v2("one", unit) * BUCKETS) for unit in units])
    two = np.array([round(hash_v2("two", unit) * BUCKETS) for unit in units])
    assert stats.chisquare(np.bincount(one // 100, minlength=100)).pvalue > 0.001
    table = np.zeros((2, 2))
    np.add.at(table, (one // 5000, two // 5000), 1)
    assert stats.chi2_contingency(table).pvalue > 0.001


@pytest.mark.parametrize(
    ("arms", "weights"), [((), None), (("a", "a"), None), (("a", "b"), (0.4, 0.1))]
)
def test_wrong_splits_are_refused(arms, weights):
    with pytest.raises(ValueError, match="expected"):
        ArmSplit.even("e", arms, weights)
