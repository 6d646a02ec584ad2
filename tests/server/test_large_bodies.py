"""Which requests leave the event loop: those that take milliseconds to prepare."""

import pytest

from recserve.schemas.items import (
    Candidate,
    ColumnCap,
    Diversity,
    Exclusions,
    Quota,
    RankBatchRequest,
    RankRequest,
    RecommendRequest,
    UserRef,
)
from recserve.server.threads import is_large, reads_store

MOST_IDS, MOST_K, MOST_REQUESTS = 512, 256, 8
USER = UserRef(id="u")
BRAND = ColumnCap(field="brand", most=1)
NEW = Diversity(at_least=Quota(count=1, new_within_s=60))


def ids(count: int) -> list[str]:
    return [f"i{number}" for number in range(count)]


def ranking(candidates: int, history: int | None = None) -> RankRequest:
    return RankRequest(
        candidates=[Candidate(item_id=i) for i in ids(candidates)],
        history=None if history is None else ids(history),
        user=USER if history is None else None,
    )


@pytest.mark.parametrize(
    ("body", "large"),
    [
        (RecommendRequest(user=USER, k=MOST_K), False),
        (RecommendRequest(user=USER, k=MOST_K + 1), True),
        (RecommendRequest(user=USER, filter={"eq": ["category", "A"]}), True),
        (RecommendRequest(user=USER, diversity=Diversity(category=1)), False),
        (RecommendRequest(user=USER, diversity=NEW), True),
        (RecommendRequest(user=USER, diversity=Diversity(at_least=[NEW.at_least])), True),
        (RecommendRequest(user=USER, diversity=Diversity(caps=[BRAND])), True),
        (RecommendRequest(history=ids(MOST_IDS)), False),
        (RecommendRequest(history=ids(MOST_IDS + 1)), True),
        (RecommendRequest(history=ids(300), exclude=Exclusions(item_ids=ids(300))), True),
        (ranking(MOST_IDS), False),
        (ranking(MOST_IDS + 1), True),
        (ranking(300, history=300), True),
        (RankBatchRequest(requests=[ranking(1)] * MOST_REQUESTS), False),
        (RankBatchRequest(requests=[ranking(1)] * (MOST_REQUESTS + 1)), True),
        (RankBatchRequest(requests=[ranking(300)] * 2), True),
        ([RecommendRequest(history=ids(300))] * 2, True),
        ([RecommendRequest(user=USER, filter={"eq": ["category", "A"]})], True),
        (None, False),
    ],
)
def test_large_requests(body, large):
    assert is_large(body) == large


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        (RecommendRequest(user=USER), True),
        (RecommendRequest(history=[]), False),
        (RecommendRequest(strategy="popular"), False),
        (ranking(1), True),
        (ranking(1, history=2), False),
        (RankBatchRequest(requests=[ranking(1, history=2), ranking(1)]), True),
        (RankBatchRequest(requests=[ranking(1, history=2)]), False),
        ([RecommendRequest(history=[]), RecommendRequest(user=USER)], True),
        ([RecommendRequest(history=[])], False),
        (None, False),
    ],
)
def test_requests_without_a_history_read_the_store(body, reads):
    assert reads_store(body) == reads
