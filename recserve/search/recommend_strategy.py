"""The base class of all recommend strategies, and the heads that they use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from recserve.core.plugins import Pluggable
from recserve.core.sequence import Sequence
from recserve.core.strategy import Strategy
from recserve.models.dense_retriever import DenseRetriever
from recserve.models.item_heads import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.search.beam_search import BeamSearch


@dataclass(frozen=True)
class Heads:
    """The networks that strategies draft or retrieve with, in addition to the recommender.

    A head that was not trained is None. Strategies that need it are then not offered.

    Attributes:
        prefixes: Drafts prefixes for `speculative`.
        nezha: Decodes for `nezha`.
        retriever: Retrieves items for `dense` and `specgr`.
    """

    prefixes: SelfDraftHead | None = None
    nezha: SelfDraftHead | None = None
    retriever: DenseRetriever | None = None


AutoRole = Literal["preferred", "default", "fallback", "hurried"]
DenseWeight = Literal["used", "ignored", "refused"]
Searching = Callable[[Seq[Sequence]], BeamSearch | None]


class RecommendStrategy(Strategy, Pluggable):
    """A strategy that requests select by name.

    All strategies honour exclusions, filters and caps (`search.slates.slate_under_caps`).

    Attributes:
        name: Name in requests, settings and reports.
        exact: Whether a slate equals full beam search.
        dense_weight: How the strategy treats a request's dense weight.
        outcome: Whether the strategy reads a request's outcome weights.
        invariant: Whether its results are bitwise independent of other requests in the invariant
            mode.
        auto: When `auto` selects it. `preferred` goes before `default`, and `fallback` comes last;
            `hurried` is for requests with a near deadline. None: never.
        replays: Name of the captured search that can replace it. None: there is none.
        missing: Advice for bundles for which `from_models` returns None.
        recorded: Replays a captured search. None: searches are not captured.
    """

    exact: ClassVar[bool] = False
    dense_weight: ClassVar[DenseWeight] = "refused"
    outcome: ClassVar[bool] = False
    invariant: ClassVar[bool] = False
    auto: ClassVar[AutoRole | None] = None
    replays: ClassVar[str | None] = None
    missing: ClassVar[str] = "this bundle lacks a model that the strategy needs"
    recorded: Searching | None = None

    @classmethod
    @abstractmethod
    def from_models(cls, model: Recommender, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender, None if a required model or head is missing."""
