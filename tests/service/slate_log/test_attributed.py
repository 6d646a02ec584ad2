"""Outcomes that name a slate: their time, their user, and what stands for their event."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recserve.schemas.events import EventInput
from recserve.service.attribution import MAX_SHOWN, MAX_TOKEN, BadToken, Signer
from recserve.service.slate_log.records import verify_tokens
from tests.support.slate_records import SIGNER, slate


def event(number: int, user: str = "u1", **fields) -> EventInput:
    token = slate(number, k=7).attribution_token
    return EventInput(user_id=user, item_id=f"i{number}", attribution_token=token, **fields)


def test_an_outcome_has_the_time_of_its_event_or_of_its_arrival():
    dated = event(1, timestamp="2026-11-24T12:00:00.000001+00:00")
    before_us = time.time_ns() // 1000
    (first, second), _ = verify_tokens([event(0), dated], set(), SIGNER, "hash")
    assert before_us <= first.time_us <= time.time_ns() // 1000
    assert second.time_us == 1_795_521_600_000_001


def test_the_key_of_an_event_belongs_to_its_user():
    events = [event(0, event_id="e"), event(1, event_id="e"), event(2)]
    found, _ = verify_tokens(events, set(), SIGNER, "id")
    first, second, third = (one.key for one in found)
    assert first == second is not None and third is None
    anonymous = SIGNER.token("r", None, "m", "c", ["i"])
    other = EventInput(user_id="u2", item_id="i", event_id="e", attribution_token=anonymous)
    (fourth,), _ = verify_tokens([other], set(), SIGNER, "id")
    assert fourth.key not in (None, first)


def test_every_bit_of_a_token_counts():
    token = SIGNER.token("r", "u1", "m", "c", ["i"])
    assert SIGNER.read(token).request_id == "r"
    for place in range(len(token)):
        changed = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
        with pytest.raises(BadToken):
            SIGNER.read(changed)
    for cut in (1, 4, 16, len(token) - 1):
        with pytest.raises(BadToken):
            SIGNER.read(token[:-cut])
    # Bits of the last character that no byte needs.
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    tokens = [SIGNER.token("r" * length, "u1", "m", "c", []) for length in range(1, 4)]
    token = next(one for one in tokens if len(one) % 4)
    with pytest.raises(BadToken):
        SIGNER.read(token[:-1] + alphabet[alphabet.index(token[-1]) ^ 1])


names = st.lists(st.text(max_size=8), unique=True, max_size=40)


@given(names, names, st.lists(st.integers(0, 1), min_size=40, max_size=40), st.booleans())
def test_a_token_names_the_items_of_its_answer_and_their_teams(shown, others, teams, mixed):
    drawn = dict(zip(shown, teams, strict=False))
    token = SIGNER.token("r", "u1", "m", "c", shown)
    if mixed:
        token = SIGNER.label(token, "x", "", list(drawn.items()))
    said = SIGNER.read(token)
    for item in shown:
        assert SIGNER.team(said, item) == (drawn[item] if mixed else 0)
    for item in set(others) - set(shown):  # 40 in 2**23 of them have a mark by chance
        with pytest.raises(BadToken, match="did not show item"):
            SIGNER.team(said, item)


@pytest.mark.parametrize("count", [0, 1, 63, MAX_SHOWN, 4096])
def test_a_token_of_a_long_answer_names_its_first_items_and_can_be_sent(count):
    items = [f"item-{number}" for number in range(count)]
    token = SIGNER.token("r" * 128, "u1", "m" * 16, "c" * 16, iter(items))
    token = SIGNER.label(token, "e" * 64, "a" * 64)
    said = SIGNER.read(token)
    assert len(token) < 500 + 4 * min(count, MAX_SHOWN) < MAX_TOKEN
    assert not any(SIGNER.team(said, item) for item in items[:MAX_SHOWN])
    for item in items[MAX_SHOWN : MAX_SHOWN + 9]:
        with pytest.raises(BadToken, match="among its first 1000 items"):
            SIGNER.team(said, item)


def test_a_short_key_signs_nothing():
    Signer(b"k" * 16)
    with pytest.raises(ValueError, match="16 bytes or more, got 15"):
        Signer(b"k" * 15)
