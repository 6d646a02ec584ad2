"""Computes prefixes in advance, so that the next request finds them in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from recserve.core.request import Prewarmed
from recserve.core.sequence import SearchSequence
from recserve.core.strategy import OneRoundStrategy, Results


class PrewarmStrategy(OneRoundStrategy):
    """Computes the prefix and nothing else."""

    def results(self, sequences: Seq[SearchSequence], draft: None, hidden: None) -> Results:
        """Returns the time and work of each request. The prefixes are already computed."""
        return [Prewarmed(sequence.timing) for sequence in sequences]
