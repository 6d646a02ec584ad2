"""Queries to the engine and their results, in item rows and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import Cap
from recserve.core.slate_tree import SlateTree
from recserve.kernels.item_graph import ItemGraph
from recserve.kernels.trie.trie import Trie
from recserve.models.inputs import NodeInputs
from recserve.models.scoring import Scoring

# Most tokens of one request of a body that gives many texts. A longer text is a request of its own.
GROUP_TOKENS = 4096


class VectorIndex(Protocol):
    """An index of the unit vectors of I items of one catalogue version.

    It holds at least every item that a request may return. Strategies search it;
    features/vectors/vector_index.py has the implementations.
    """

    @property
    def num_items(self) -> int:
        """The number of indexed items, I."""
        ...

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the nearest items of each query, best first.

        Args:
            queries: [n, E] float32 unit vectors.
            k: Items per query, 1..I. With k = I, every item is returned.

        Returns:
            Item rows [n, k] int64 and inner products [n, k] float32. An approximate index may find
            fewer items; the remaining rows are -1.
        """
        ...

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors [n, E] float32 of rows [n] that a search found."""
        ...


@dataclass(frozen=True)
class Prefix:
    """The cacheable prefix of a request: a user's history as the model reads it.

    Attributes:
        inputs: n input rows, oldest first.
        keys: [n] int64 identity of each row. Equal keys must mean equal rows, because the prefix
            cache compares keys only.
        shared: Number of first rows that all rows attend to (MTGR's profile and long history). They
            are cached as one piece.
    """

    inputs: NodeInputs
    keys: np.ndarray
    shared: int = 0


@dataclass(frozen=True, kw_only=True)
class SlateQuery:
    """A request for the k best items.

    Attributes:
        prefix: The user's history.
        trie: Catalogue version to answer from.
        k: Number of items.
        beam_width: Requested beam width. See `width`.
        strategy: Name of the strategy.
        excluded: Item rows that must not be returned. None: none.
        allowed: Items of this version that may be returned. None allows all.
        dense_weight: Weight of the dense head's log-probability relative to the semantic id's. With
            a weight above 0, the head's own best `width` items compete with the finished beams.
        deadline_s: `time.monotonic()` value after which the result is useless. None: no deadline.
        graph: Graph of similar items for `rpg`. None: `rpg` scores all items.
        index: Vectors of the trie's items, for `dense` and `specgr`.
        outcome: [O] share of each outcome of the retriever in the draft. None: the retriever's own
            mix.
        caps: Limits on the items of each group, applied greedily from the best down. If a search
            finds too few items under the caps, it is repeated without the items of full groups.
        explain: Whether the slate comes with the tree of its search. The slate is the same.
        log_probs: Whether the slate comes with the log-probabilities of its items.
        unwanted: Items whose dense scores are lowered, as far as there is a dense weight.
        scoring: How `beam` scores items. None: as the model says.
    """

    prefix: Prefix
    trie: Trie
    k: int
    beam_width: int
    strategy: str = "beam"
    excluded: np.ndarray | None = None
    allowed: AllowedItems | None = None
    dense_weight: float = 0.0
    deadline_s: float | None = None
    graph: ItemGraph | None = None
    index: VectorIndex | None = None
    outcome: np.ndarray | None = None
    caps: tuple[Cap, ...] = ()
    explain: bool = False
    log_probs: bool = False
    unwanted: LoweredItems | None = None
    scoring: Scoring | None = None

    @property
    def width(self) -> int:
        """Beam width of the search: `beam_width`, and at least k."""
        return max(self.beam_width, self.k)


@dataclass(frozen=True)
class LoweredItems:
    """Items whose scores are lowered.

    Attributes:
        rows: [n] int64 ascending item rows.
        amounts: [n] float32 by how much.
    """

    rows: np.ndarray
    amounts: np.ndarray

    def by_row(self) -> dict[int, float]:
        """Returns the amounts by row."""
        return dict(zip(self.rows.tolist(), self.amounts.tolist(), strict=True))

    def lower(self, slate: Slate) -> Slate:
        """Returns a slate with lowered scores, in the same order."""
        at = np.minimum(np.searchsorted(self.rows, slate.rows), self.rows.size - 1)
        amounts = np.where(self.rows[at] == slate.rows, self.amounts[at], np.float32(0))
        return replace(slate, scores=slate.scores - amounts)


@dataclass(frozen=True)
class PrefixKeys:
    """The keys of a prefix that the engine should forget, together with its beginnings.

    Attributes:
        keys: [n] int64, as in `Prefix`.
        shared: As in `Prefix`.
        kept: Number of first rows whose pages and cached prefixes stay.
        drafter: Drafter whose own keys and values the pages hold as well. Its prefixes are found
            only with the same name. Empty if there is none.
        salt: As in `Client`. None: the prefixes of every salt.
    """

    keys: np.ndarray
    shared: int = 0
    kept: int = 0
    drafter: str = ""
    salt: bytes | None = None


@dataclass(frozen=True)
class LikelihoodQuery:
    """A request to score given items by the log-probability of their semantic ids.

    Attributes:
        prefix: The user's history.
        trie: Catalogue version of the items.
        rows: [M] item rows.
        deadline_s: As in `SlateQuery`.
    """

    prefix: Prefix
    trie: Trie
    rows: np.ndarray
    deadline_s: float | None = None


@dataclass(frozen=True)
class RankQuery:
    """A request to score candidates with the ranker.

    Attributes:
        prefix: The user's history.
        candidates: M input rows, one token each.
        prefix_limits: [M] number of prefix rows that each candidate attends to: those older than
            its exposure. None: all rows.
        deadline_s: As in `SlateQuery`.
    """

    prefix: Prefix
    candidates: NodeInputs
    prefix_limits: np.ndarray | None = None
    deadline_s: float | None = None


@dataclass(frozen=True)
class PrewarmQuery:
    """A request to compute a prefix, so that the next request on it computes only its tree.

    Attributes:
        prefix: The user's history.
        model: The model that reads it.
        deadline_s: As in `SlateQuery`.
    """

    prefix: Prefix
    model: Literal["recommender", "ranker"]
    deadline_s: float | None = None


@dataclass(frozen=True)
class TextScoreQuery:
    """A request to score label tokens after each of M texts that share a prefix.

    Attributes:
        prefix: The shared prefix.
        tokens: [n] int64 tokens of the texts, packed.
        offsets: [M + 1] start of each text. No text is empty.
        labels: K token ids.
        deadline_s: As in `SlateQuery`.
        group: Number of times GROUP_TOKENS that the same body has before this request. Later
            groups give way to the requests of other bodies.
    """

    prefix: Prefix
    tokens: np.ndarray
    offsets: np.ndarray
    labels: tuple[int, ...]
    deadline_s: float | None = None
    group: int = 0


@dataclass(frozen=True)
class PromptQuery:
    """A request for the log-probabilities or the mean state of a prompt's own tokens.

    Attributes:
        prefix: An empty prefix.
        tokens: [n] int64 tokens of the prompt, at least one.
        num_top: Number of likeliest tokens to report at each place; None computes no
            log-probabilities.
        mean: Whether to report the mean of the final hidden states.
        deadline_s: As in `SlateQuery`.
        group: As in `TextScoreQuery`.
    """

    prefix: Prefix
    tokens: np.ndarray
    num_top: int | None = None
    mean: bool = False
    deadline_s: float | None = None
    group: int = 0


Request = SlateQuery | LikelihoodQuery | RankQuery | PrewarmQuery | TextScoreQuery | PromptQuery


@dataclass
class Timing:
    """Milliseconds that a request spent in each stage of the engine, and counts of its target work.

    Attributes:
        queue_ms: Time in the queue.
        prefill_ms: Time of forwards that compute the prefix.
        draft_ms: Time of proposing the trees.
        verify_ms: Time of forwards over the trees, and of the search itself.
        total_ms: Time from submission to result.
        forwards: Target forwards.
        nodes: Tree nodes that the target computed.
        prefix_cached: Prefix tokens found in the prefix cache.
        prefix_computed: Prefix tokens that were computed.
        preemptions: Times that the request gave its pages to another one.
        drafted: Whether a head or a cached draft proposed the scored nodes. `speculative` without a
            draft is beam search.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    total_ms: float = 0.0
    forwards: int = 0
    nodes: int = 0
    prefix_cached: int = 0
    prefix_computed: int = 0
    preemptions: int = 0
    drafted: bool = False


@dataclass(frozen=True)
class Slate:
    """Result of a SlateQuery: at most k items, best first.

    It is shorter only if fewer valid items exist.

    Attributes:
        rows: [k] int64 item rows.
        scores: [k] float32.
        exact: Whether the slate equals full beam search of the requested width. With caps, it
            equals all the beam searches that were needed (search/slates.py).
        rounds: Tree forwards of all searches.
        timing: Time and work of the request.
        tree: The scored prefixes. None without `explain`, and for searches that score no prefixes.
        log_probs: [k] float32 log-probability of each item's semantic id under the target, without
            a dense head. None unless the query wants it, and where the target scored no items.
    """

    rows: np.ndarray
    scores: np.ndarray
    exact: bool
    rounds: int
    timing: Timing = field(default_factory=Timing)
    tree: SlateTree | None = None
    log_probs: np.ndarray | None = None


@dataclass(frozen=True)
class Continuation:
    """Another search on the same prefix, because the caps left the slate too short.

    Attributes:
        request: The same request, open only to items that can be added to the chosen ones.
        rows: [n] int64 items chosen by this search and those before it.
        scores: [n] float32 scores of `rows`.
        log_probs: [n] float32, as in `Slate`.
    """

    request: SlateQuery
    rows: np.ndarray
    scores: np.ndarray
    log_probs: np.ndarray | None = None


@dataclass(frozen=True)
class Scores:
    """Result of a LikelihoodQuery, RankQuery or TextScoreQuery, in the order of its candidates.

    Attributes:
        values: [M, tasks] float32. For labels, these are log-probabilities over the whole
            vocabulary.
        tasks: Task names of the model (`likelihood` has one), or the label tokens.
        timing: Time and work of the request.
    """

    values: np.ndarray
    tasks: tuple[str, ...]
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class Prewarmed:
    """Result of a PrewarmQuery.

    Attributes:
        timing: Time and work of the request.
    """

    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class PromptScores:
    """Result of a PromptQuery. Row i of the arrays is about token i + 1 of the prompt.

    Attributes:
        mean: [E] float32 mean of the final hidden states. None if not requested.
        chosen: [n - 1] float32 log-probability of each token after those before it.
        ranks: [n - 1] int64 rank of each token, 1 for the likeliest.
        top_tokens: [n - 1, k] int64 likeliest tokens, best first.
        top_values: [n - 1, k] float32 their log-probabilities.
        timing: Time and work of the request.
    """

    mean: np.ndarray | None = None
    chosen: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    ranks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    top_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    top_values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    timing: Timing = field(default_factory=Timing)


Result = Slate | Scores | Prewarmed | PromptScores
