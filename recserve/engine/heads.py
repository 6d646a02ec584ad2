"""The networks beside a recommender that strategies draft or retrieve with."""

from __future__ import annotations

from dataclasses import dataclass

from recserve.models.dense_retriever import DenseRetriever
from recserve.models.drafters.nezha import SelfDraftHead


@dataclass(frozen=True)
class Heads:
    """None: not trained, and the strategies that need it are not offered.

    self_draft: drafts for `speculative`. nezha: decodes for `nezha`. retriever: retrieves for
    `dense` and `specgr`.
    """

    self_draft: SelfDraftHead | None = None
    nezha: SelfDraftHead | None = None
    retriever: DenseRetriever | None = None
