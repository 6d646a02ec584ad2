"""A draft that stays with a cached prefix does not hold what its request excluded."""

import weakref

import numpy as np
import torch

from recserve.core.request import Prefix, SlateQuery
from recserve.kernels.trie.trie import build_trie
from recserve.models.inputs import NodeInputs
from recserve.search.strategies.speculative import CachedDraft

TRIE = build_trie(torch.cartesian_prod(torch.arange(4), torch.arange(4)), (4, 4))
ROOT = Prefix(NodeInputs(torch.arange(3)), np.arange(3))


def asked(excluded):
    return SlateQuery(
        prefix=ROOT, trie=TRIE, k=5, beam_width=8, strategy="speculative", excluded=excluded
    )


def draft_of(excluded):
    return CachedDraft.of(asked(excluded), torch.arange(3))


def test_the_excluded_rows_are_let_go():
    excluded = np.arange(8192)
    gone = weakref.ref(excluded)
    draft = draft_of(excluded)
    assert len(draft.excluded) == 16
    del excluded
    assert gone() is None


def test_a_draft_fits_the_same_exclusions_and_no_others():
    draft = draft_of(np.array([3, 5]))
    assert draft.fits(asked(np.array([3, 5])))
    assert draft.fits(asked(np.array([3, 5], np.int32)))
    for other in (None, np.array([3]), np.array([5, 3]), np.array([3, 5, 7])):
        assert not draft.fits(asked(other))


def test_no_exclusions_and_an_empty_list_are_the_same():
    assert draft_of(None).fits(asked(np.empty(0, np.int64)))
    assert draft_of(np.empty(0, np.int64)).fits(asked(None))
