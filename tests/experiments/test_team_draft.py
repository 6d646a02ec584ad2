"""Team-draft interleaving: fair, complete, without repeats."""

import random

from hypothesis import given
from hypothesis import strategies as st

from recserve.experiments.team_draft import team_draft

slates = st.lists(st.integers(0, 12), unique=True, max_size=8)


@given(slates, slates, st.integers(1, 10), st.integers())
def test_items_are_distinct_and_in_the_order_of_their_team(first, second, k, seed):
    mixed = team_draft(first, second, lambda item: item, k, random.Random(seed))
    items = [item for item, _ in mixed]
    assert len(items) == len(set(items)) == min(k, len({*first, *second}))
    for team, slate in enumerate((first, second)):
        own = [item for item, by in mixed if by == team]
        assert own == [item for item in slate if item in own]


@given(st.integers(1, 5), st.integers())
def test_teams_alternate_in_pairs(pairs, seed):
    first, second = list(range(20)), list(range(100, 120))
    mixed = team_draft(first, second, lambda item: item, 2 * pairs, random.Random(seed))
    teams = [team for _, team in mixed]
    assert all({teams[i], teams[i + 1]} == {0, 1} for i in range(0, 2 * pairs, 2))


def test_each_team_begins_as_often():
    starts = [team_draft("ab", "cd", str, 1, random.Random(f"seed:{i}"))[0][1] for i in range(2000)]
    assert 900 < sum(starts) < 1100
