"""A number that no search expects is refused when a query is submitted from Python."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from recserve.core.diversity import Cap
from recserve.core.request import (
    LikelihoodQuery,
    Prefix,
    PrewarmQuery,
    PromptQuery,
    RankQuery,
    SlateQuery,
    TextScoreQuery,
)
from recserve.engine.request_checks import check_numbers
from recserve.models.inputs import NodeInputs
from recserve.schemas.items import MAX_K, RecommendRequest
from recserve.schemas.validation import to_message
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.dense_worlds import World
from tests.support.listed_groups import ListedGroups
from tests.support.recommenders import draw_prefix

WORLD = World()
ROOT = draw_prefix(WORLD.model, 4, 1)
ROWS = WORLD.trie.num_rows
BARE = Prefix(NodeInputs(ROOT.inputs.tokens[:0]), ROOT.keys[:0])
GROUPS = ListedGroups(np.arange(ROWS + 1), np.arange(ROWS))
SLATE = SlateQuery(prefix=ROOT, trie=WORLD.trie, k=3, beam_width=4, index=WORLD.index)
QUERIES = (
    SLATE,
    LikelihoodQuery(ROOT, WORLD.trie, np.arange(3)),
    RankQuery(ROOT, ROOT.inputs, np.arange(len(ROOT.keys))),
    PrewarmQuery(ROOT, "recommender"),
    TextScoreQuery(BARE, np.arange(6), np.array([0, 2, 6]), (1, 2)),
    PromptQuery(BARE, np.arange(3), 2),
    TextQuery(np.arange(3)),
)
INTS = (-3, 0, 2.5, math.nan, math.inf, True, "3", None, -(2**70), 2**70)
FLOATS = (-0.1, math.nan, math.inf, -math.inf, "1", True, 2**70)
WRONG = {
    "k": INTS,
    "beam_width": INTS,
    "dense_weight": (*FLOATS, None),
    "deadline_s": (math.nan, math.inf, "1"),
    "excluded": (np.array([0.5]), np.array([math.nan]), np.array([[1]]), [1]),
    "rows": (np.array([ROWS]), np.array([-1, 0]), np.array([math.nan]), None),
    "outcome": (np.array([math.nan, 1]), np.array([-1.0, 2]), np.zeros(2), np.array([math.inf, 1])),
    "caps": tuple((Cap(GROUPS, limit),) for limit in INTS),
    "prefix_limits": (np.array([9, 0, 0, 0, 0]), np.array([-1, 0, 0, 0, 0]), np.array([1])),
    "tokens": (np.array([-1]), np.array([1.5]), np.zeros(0, np.int64)),
    "offsets": (np.array([0, 3]), np.array([0, 4, 2, 6]), np.array([0, 0, 6]), np.array([6])),
    "labels": ((-1,), (1.5,), (math.nan,)),
    "group": tuple(value for value in INTS if value != 0),
    "num_top": tuple(value for value in INTS if value not in (0, None)),
    "priority": (2.5, math.nan, "3", None, 2**70),
    "prefix": tuple(replace(ROOT, shared=n) for n in (-1, 6, 1.5, math.nan)),
}
CASES = [
    (query, name, value)
    for query in QUERIES
    for name, values in WRONG.items()
    if hasattr(query, name)
    for value in values
    if not (isinstance(query, TextScoreQuery) and name == "tokens" and np.size(value) == 0)
]
PARAMS = {
    "temperature": FLOATS,
    "top_p": FLOATS,
    "min_p": FLOATS,
    "repetition_penalty": FLOATS,
    "presence_penalty": (*FLOATS[1:], -100.5),
    "frequency_penalty": (*FLOATS[1:], -100.5),
    "top_k": tuple(value for value in INTS if value != 0),
    "max_tokens": INTS,
    "min_tokens": tuple(value for value in INTS if value != 0),
    "logprobs": tuple(value for value in INTS if value not in (0, None)),
    "seed": (2.5, math.nan, "3", None, True, 2**70),
    "logit_bias": ({-1: 0.0}, {1.5: 0.0}, {1: math.nan}, {1: "x"}),
    "stop_token_ids": ((-1,), (1.5,)),
    "bad_words": (((-1,),), ((math.nan,),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_number_is_refused_by_name(name):
    for query, field, value in CASES:
        if field != name:
            continue
        with pytest.raises(ValueError, match=rf"^{name}(\.\w+)?: expected "):
            check_numbers(replace(query, **{name: value}))


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: type(query).__name__)
def test_right_numbers_pass(query):
    check_numbers(query)
    check_numbers(replace(query, deadline_s=1e9))


@pytest.mark.parametrize("name", PARAMS)
def test_a_wrong_sampling_parameter_is_refused_by_name(name):
    for value in PARAMS[name]:
        with pytest.raises(ValueError, match=rf"^{name}: expected "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [-1, 2.5, math.nan, "3"])
def test_drafting_options_are_refused_by_name(value):
    with pytest.raises(ValueError, match="^num_tokens: expected int"):
        Speculation("none", num_tokens=value)
    with pytest.raises(ValueError, match="^tree: expected int"):
        Speculation("none", tree=((value,),))


@pytest.mark.parametrize("k", [-3, 0, 2.5, "3"])
def test_the_engine_says_what_http_says(k):
    with pytest.raises(ValueError) as there:
        to_message({"history": ["a"], "k": k}, RecommendRequest)
    with pytest.raises(ValueError, match=f"^{re.escape(str(there.value))}$"):
        WORLD.engine.submit(replace(SLATE, k=k))


@pytest.mark.parametrize("strategy", ["beam", "dense", "specgr"])
def test_the_largest_k_ends(strategy):
    """With every item, or as too large for the pages."""
    for k in (MAX_K, 2**31 - 1):
        try:
            slate = WORLD.engine.run(replace(SLATE, k=k, strategy=strategy))
        except ValueError as error:
            assert "pages" in str(error)
        else:
            assert len(slate.rows) == ROWS
