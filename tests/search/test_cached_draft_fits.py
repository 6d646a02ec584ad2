"""A cached draft proves the slate of an equal request only: any other field makes it unfit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import Cap
from recserve.core.request import Prefix, SlateQuery
from recserve.kernels.trie.trie import build_trie
from recserve.models.inputs import NodeInputs
from recserve.search.strategies.speculative import CachedDraft

CODES = torch.cartesian_prod(torch.arange(4), torch.arange(4))
TRIE, OTHER = build_trie(CODES, (4, 4)), build_trie(CODES, (4, 4))
REQUEST = SlateQuery(
    prefix=Prefix(NodeInputs(torch.arange(3)), np.arange(3)),
    trie=TRIE,
    k=5,
    beam_width=8,
    strategy="speculative",
)
EVERYTHING = AllowedItems(np.full(2, 255, np.uint8), 16)


@pytest.mark.parametrize(
    "fields",
    [
        {"k": 4},
        {"beam_width": 9},
        {"trie": OTHER},
        {"dense_weight": 0.5},
        {"excluded": np.array([1])},
        {"allowed": EVERYTHING},
        {"caps": (Cap(np.zeros(16, np.int64), 2),)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_another_request_does_not_use_the_draft(fields):
    draft = CachedDraft.of(REQUEST, torch.arange(3))
    assert draft.fits(REQUEST)
    assert not draft.fits(replace(REQUEST, **fields))
    if not {"allowed", "caps"} & fields.keys():  # only drafts of plain requests are cached
        assert not CachedDraft.of(replace(REQUEST, **fields), torch.arange(3)).fits(REQUEST)


def test_a_new_draft_has_all_its_nodes_and_keeps_them():
    nodes = torch.arange(3)
    draft = CachedDraft.of(REQUEST, nodes)
    nodes += 1
    assert draft.nodes.tolist() == [0, 1, 2] and not draft.trimmed
