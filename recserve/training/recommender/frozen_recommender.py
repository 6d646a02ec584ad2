"""A bundle's recommender with frozen weights, on which heads are trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.cases import Cases, leave_one_out_cases
from recserve.features.tables.events import EventLog
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.recommender import Recommender, load_recommender


@dataclass(frozen=True)
class FrozenRecommender:
    """A frozen recommender with its catalogue and its data.

    Attributes:
        model: The recommender without gradients, on the device of the trie.
        trie: Trie of the semantic ids.
        codes: [I, L] semantic ids of the catalogue.
        events: Training part of the event log.
        cases: Validation part of the event log.
    """

    model: Recommender
    trie: Trie
    codes: NDArray[np.generic]
    events: EventLog
    cases: Cases

    @staticmethod
    def open(bundle: Bundle, device: torch.device) -> FrozenRecommender:
        """Loads the bundle's recommender.

        Raises:
            BundleError: If the bundle has no recommender.
        """
        if not bundle.has("recommender"):
            raise BundleError(
                f"{bundle.root}: no recommender was trained; run `recserve train recommender` first"
            )
        catalog, events = bundle.catalog(), bundle.events()
        codes = torch.from_numpy(catalog.semantic_ids.codes.astype(np.int64))
        model = load_recommender(
            bundle.directory("recommender"), codes, torch.from_numpy(catalog.vectors), device
        )
        return FrozenRecommender(
            model.requires_grad_(False),
            build_trie(codes, model.config.codebook_sizes).to(device),
            catalog.semantic_ids.codes,
            events.leave_one_out().train,
            leave_one_out_cases(events, "valid"),
        )
