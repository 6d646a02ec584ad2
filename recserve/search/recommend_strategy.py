"""What every strategy of a recommend request declares."""

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
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.drafters.prefix_head import PrefixHead
from recserve.models.recommender import Recommender
from recserve.search.beams import Beams


@dataclass(frozen=True)
class Heads:
    """None: not trained, and the strategies that need it are not offered.

    prefixes: drafts for `speculative`. nezha: decodes for `nezha`. retriever: retrieves for
    `dense` and `specgr`.
    """

    prefixes: PrefixHead | None = None
    nezha: SelfDraftHead | None = None
    retriever: DenseRetriever | None = None


AutoRole = Literal["preferred", "default", "fallback", "hurried"]
DenseWeight = Literal["used", "ignored", "refused"]
Searching = Callable[[Seq[Sequence]], Beams | None]


class RecommendStrategy(Strategy, Pluggable):
    """A strategy that requests choose by its name.

    All strategies honour exclusions, filters and caps (`search.capped.answer`).

    Attributes:
        name: Name in requests, settings and reports.
        aliases: Older names that requests and settings may still use.
        exact: Whether a slate equals full beam search.
        dense_weight: What becomes of a request's dense weight.
        outcome: Whether it reads a request's outcome weights.
        invariant: Whether its bits do not depend on other requests in the invariant mode.
        auto: When `auto` takes it. `preferred` goes before `default`, and `fallback` comes last;
            `hurried` is for requests whose deadline is near. None: never.
        replays: Name of the recorded search that can answer for it. None: there is none.
        missing: What to do where `from_models` returns None.
        recorded: Replays a recorded search. None: searches are not recorded.
    """

    aliases: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False
    dense_weight: ClassVar[DenseWeight] = "refused"
    outcome: ClassVar[bool] = False
    invariant: ClassVar[bool] = False
    auto: ClassVar[AutoRole | None] = None
    replays: ClassVar[str | None] = None
    missing: ClassVar[str] = "this bundle lacks what the strategy needs"
    recorded: Searching | None = None

    @classmethod
    @abstractmethod
    def from_models(cls, model: Recommender, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender, None where a model or head is missing."""
