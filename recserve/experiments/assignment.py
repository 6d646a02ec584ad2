"""Assignment of units to arms by hash, compatible with GrowthBook's SDKs (hash version 2).

An assignment is a pure function of the unit, the seed and the arm ranges, so it needs no state and
any GrowthBook SDK computes the same one. Raising the coverage never moves a unit between arms.
Changing the weights does.

Source: GrowthBook SDK specification 0.7.1 (hash, bucket ranges, namespaces).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FNV_OFFSET = 0x811C9DC5
FNV_PRIME = 0x01000193
BUCKETS = 10_000
NAMESPACE_BUCKETS = 1_000
WEIGHT_TOLERANCE = 0.01


@dataclass(frozen=True)
class BucketRange:
    """A half-open interval of hash values.

    Attributes:
        start: First value inside.
        end: First value outside.
    """

    start: float
    end: float

    def __contains__(self, value: float) -> bool:
        return self.start <= value < self.end


@dataclass(frozen=True)
class Namespace:
    """A share of all units that an experiment may use, so that experiments exclude each other.

    Attributes:
        name: Experiments of one name share the hash.
        range: Hash values of the units that take part.
    """

    name: str
    range: BucketRange

    def includes(self, unit: str) -> bool:
        """Returns whether the unit belongs to this share; version 1 of the hash, as in the SDKs."""
        value = fnv1a_32(f"{unit}__{self.name}") % NAMESPACE_BUCKETS / NAMESPACE_BUCKETS
        return value in self.range


@dataclass(frozen=True)
class Assignment:
    """The arm of one unit.

    Attributes:
        arm: Name of the arm; None if the unit takes no part.
        bucket: Bucket number from 0 to 9,999.
    """

    arm: str | None
    bucket: int


@dataclass(frozen=True)
class ArmSplit:
    """A division of units into arms.

    Attributes:
        seed: Seed of the hash; GrowthBook's default is the experiment's key.
        arms: Names of the arms, the control first.
        ranges: One range of hash values per arm.
        namespace: Share of all units that takes part; None for all.
    """

    seed: str
    arms: tuple[str, ...]
    ranges: tuple[BucketRange, ...]
    namespace: Namespace | None = None

    @classmethod
    def even(
        cls,
        seed: str,
        arms: Sequence[str],
        weights: Sequence[float] | None = None,
        coverage: float = 1.0,
    ) -> ArmSplit:
        """Returns a split by weights.

        Args:
            seed: Seed of the hash.
            arms: Names of the arms, at least one, all different.
            weights: Share of each arm, sum 1; None for equal shares.
            coverage: Share of units that takes part, 0 to 1.

        Raises:
            ValueError: If names repeat, or weights do not fit the arms or do not add up to 1.
        """
        if not arms or len(set(arms)) != len(arms):
            raise ValueError(f"arms {list(arms)}: expected at least one name, all different")
        if weights is not None and not valid_weights(weights, len(arms)):
            raise ValueError(
                f"weights {list(weights)}: expected {len(arms)} numbers that add up to 1"
            )
        ranges = bucket_ranges(len(arms), coverage, weights)
        return cls(seed=seed, arms=tuple(arms), ranges=ranges)

    def assign(self, unit: str) -> Assignment:
        """Returns the arm and the bucket of a unit, always the same ones."""
        value = hash_v2(self.seed, unit)
        bucket = round(value * BUCKETS)
        if self.namespace is not None and not self.namespace.includes(unit):
            return Assignment(arm=None, bucket=bucket)
        chosen = choose_range(value, self.ranges)
        return Assignment(arm=None if chosen is None else self.arms[chosen], bucket=bucket)


def fnv1a_32(text: str) -> int:
    """Returns the 32-bit FNV-1a hash of the text's UTF-16 code units, as the JavaScript SDK does.

    JavaScript keeps text in UTF-16. A character beyond U+FFFF is two units there, and one half of
    it alone is a unit, too.
    """
    units = text.encode("utf-16-le", "surrogatepass")
    value = FNV_OFFSET
    for low, high in zip(units[::2], units[1::2], strict=True):
        value = (value ^ (low | high << 8)) * FNV_PRIME & 0xFFFFFFFF
    return value


def hash_v2(seed: str, value: str) -> float:
    """Returns a number from 0 to 0.9999 in steps of 0.0001, uniform over values."""
    return fnv1a_32(str(fnv1a_32(seed + value))) % BUCKETS / BUCKETS


def valid_weights(weights: Sequence[float], num_arms: int) -> bool:
    """Returns whether there is one weight per arm and they add up to 1 within one per cent."""
    return len(weights) == num_arms and abs(sum(weights) - 1) <= WEIGHT_TOLERANCE


def bucket_ranges(
    num_arms: int, coverage: float = 1.0, weights: Sequence[float] | None = None
) -> tuple[BucketRange, ...]:
    """Returns one range per arm, as GrowthBook's getBucketRanges does.

    The range of an arm starts where it would start at full coverage, so that a higher coverage
    only adds units. Coverage outside 0 to 1 is clipped; weights that do not fit become equal ones.
    """
    coverage = min(max(coverage, 0.0), 1.0)
    if weights is None or not valid_weights(weights, num_arms):
        weights = [1 / num_arms] * num_arms if num_arms > 0 else []
    ranges = []
    start = 0.0
    for weight in weights:
        ranges.append(BucketRange(start=start, end=start + coverage * weight))
        start += weight
    return tuple(ranges)


def choose_range(value: float, ranges: Sequence[BucketRange]) -> int | None:
    """Returns the index of the first range that holds the value; None if there is none."""
    for index, one in enumerate(ranges):
        if value in one:
            return index
    return None
