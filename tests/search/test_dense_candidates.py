"""The dense head's best items, which compete with the beams: their own log-probabilities."""

from dataclasses import replace

import numpy as np
import pytest

from recserve.core.allowed import AllowedItems
from recserve.kernels.native import native
from tests.support.device_worlds import recommending

if native.library() is None:
    pytest.skip("there is no compiler", allow_module_level=True)


@pytest.mark.parametrize("trie", ["trie", "live"])
@pytest.mark.parametrize("strategy", ["beam", "nezha", "speculative"])
def test_dense_candidates_are_scored_alike_in_c_and_in_torch(strategy, trie, force_kernels):
    """A search that only they may pass, and path by path; hidden and new items, none and few."""
    slates = {}
    for kernels in ("auto", "torch"):
        force_kernels(kernels)
        world = recommending("cpu")
        asked = world.ask(strategy, "live" if trie == "live" else "plain", events=(3, 9, 1, 5))
        few = AllowedItems.of(np.arange(getattr(world, trie).num_rows) % 9 == 2)
        changes = [{}, {"allowed": few}, {"dense_weight": 0.0}, {"beam_width": 40, "k": 30}]
        asked = [
            replace(request, **{"dense_weight": 0.7, **change})
            for request, change in zip(asked, changes, strict=True)
        ]
        slates[kernels] = world.engine.run_many(asked)
    for one, other in zip(slates["auto"], slates["torch"], strict=True):
        assert one.rows.tolist() == other.rows.tolist() and len(one.rows)
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5, atol=1e-5)
