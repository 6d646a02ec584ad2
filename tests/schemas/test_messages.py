"""Bodies: what is refused, and that the message names field, bound and what came."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recserve.experiments.settings import parse_experiments
from recserve.schemas.items import InvalidRequest, ItemInput, RankRequest, RecommendRequest
from recserve.schemas.text import CompletionRequest
from recserve.schemas.validation import to_message
from recserve.server.body_decoder import MalformedBody, decode

RECOMMEND = msgspec.json.Decoder(RecommendRequest)
RANK = msgspec.json.Decoder(RankRequest)


@pytest.mark.parametrize(
    "decoder, raw, param, words",
    [
        (
            RECOMMEND,
            '{"exclude": {"beam_widht": 1}}',
            "exclude.beam_widht",
            "fields are item_ids, seen",
        ),
        (RECOMMEND, '{"outcome": {"a": 1, "b": 0, "c": 1}}', "outcome.b", "> 0"),
        (RECOMMEND, '{"outcome": {"a": 1, "": 1}}', "outcome", "invalid key"),
        (RECOMMEND, '{"outcome": {"a": 0}, "k": 0}', "outcome.a", "got 0"),
        (RECOMMEND, '{"filter":' + '{"not":' * 50_000 + "1" + "}" * 50_001, None, "too deep"),
        (RANK, '{"candidates": [{"item_id": "a"}, {"id": "a"}]}', "candidates[1].id", "item_id"),
        (
            RANK,
            '{"candidates": [{"item_id": "a", "features": {"x": 1}},'
            ' {"item_id": "b", "features": {"x": 1, "y": "2"}}]}',
            "candidates[1].features.y",
            "float",
        ),
    ],
)
def test_a_body_names_field_bound_and_value(decoder, raw, param, words):
    """Other fields and values are those of the recorded requests."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        decode(decoder, raw.encode())
    assert caught.value.param == param


NOT_JSON = (
    *(b"", b"{", b'{"k": 1} x', b'{"k": NaN}', b'{"strategy": "\xff"}'),
    *(b'{"k": "x", "strategy": "\xff"}', b'{"k": 0, "k\xa9": 1}'),
)


@pytest.mark.parametrize(
    "raw", [*NOT_JSON, b'{"k": "x", "strategy": "\xff"}', b'{"k": 0, "k\xa9": 1}']
)
def test_what_is_not_json_is_malformed(raw):
    """Whatever else is wrong with its fields."""
    with pytest.raises(MalformedBody):
        decode(RECOMMEND, raw)


def test_number_out_of_range_is_not_an_internal_error():
    with pytest.raises(InvalidRequest):
        decode(RANK, b'{"candidates": [{"item_id": "a", "features": {"x": 1e400}}]}')


def test_long_values_are_not_echoed_whole():
    with pytest.raises(InvalidRequest) as caught:
        decode(RECOMMEND, b'{"strategy": "%s"}' % (b"s" * 100_000))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "kind, given, message",
    [
        (
            ItemInput,
            {"item_id": "a", "categories": ["b", ""]},
            'categories[1]: expected str of length >= 1, got ""',
        ),
        (
            CompletionRequest,
            {"prompt": "", "logit_bias": {"7": 1, "8": 1000, "9": 1}},
            "logit_bias.8: expected float <= 100.0, got 1000",
        ),
    ],
)
def test_values_of_plain_types_are_refused_in_the_same_words(kind, given, message):
    with pytest.raises(InvalidRequest) as caught:
        to_message(given, kind)
    assert str(caught.value) == message


def test_values_that_json_cannot_write_are_named():
    """Settings come from YAML and Python, which have numbers that JSON has no word for."""
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidRequest, match=f"expected float .*, got {value}$"):
            to_message({"dense_weight": value}, RecommendRequest)


@given(st.integers().filter(lambda value: value != 2))
def test_a_number_among_few_is_named(value):
    arms = [{"name": "a"}, {"name": "b"}]
    wrong = {"name": "s", "use": "recommend", "arms": arms, "hash_version": value}
    with pytest.raises(InvalidRequest, match=f"hash_version: expected 2, got {value}"[:70]):
        parse_experiments([wrong])
