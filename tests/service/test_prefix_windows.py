"""The events of a history that the recommender's prefix holds, for every length of the window."""

import numpy as np
import pytest
import torch

from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.recommender import Recommender
from recserve.service.prefixes import RecommenderPrefixBuilder

DECODER = DecoderConfig(8, 1, 1, 1, 8, 8)


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 7, 50])
def test_a_prefix_holds_the_newest_events(longest):
    """At most the longest history, and at least three quarters of it; models of one event too."""
    config = RecommenderConfig(DECODER, (4, 4), max_history_items=longest)
    prefixes = RecommenderPrefixBuilder(Recommender(config), torch.device("cpu"))
    used = np.array([prefixes.count_used(count) for count in range(4 * longest + 3)])
    assert (used[: longest + 1] == np.arange(longest + 1)).all()
    assert used.max() == longest
    assert used[longest:].min() > longest - max(longest / 4, 1)
