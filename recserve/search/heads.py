"""The networks beside a recommender that strategies draft or retrieve with."""

from __future__ import annotations

from dataclasses import dataclass

from recserve.models.dense_retriever import DenseRetriever
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.drafters.prefix_head import PrefixHead


@dataclass(frozen=True)
class Heads:
    """None: not trained, and the strategies that need it are not offered.

    prefixes: drafts for `speculative`. nezha: decodes for `nezha`. retriever: retrieves for
    `dense` and `specgr`.
    """

    prefixes: PrefixHead | None = None
    nezha: SelfDraftHead | None = None
    retriever: DenseRetriever | None = None
