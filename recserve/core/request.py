"""What a caller asks of the engine, in rows and tensors, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import Cap
from recserve.kernels.trie.item_graph import ItemGraph
from recserve.kernels.trie.trie_view import TrieView
from recserve.models.inputs import NodeInputs


class VectorIndex(Protocol):
    """Unit vectors of I item rows of one catalogue version: of all that may be answered at least.

    Implementations: features/vectors/vector_index.py, features/vectors/grown_index.py.
    """

    @property
    def num_items(self) -> int:
        """I."""
        ...

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows [n, k] int64 and inner products [n, k] float32 of the nearest items, best first.

        queries: [n, E] float32. k: 1..I; with k = I every item comes. An index that does not look
        everywhere may find fewer, with row -1 in the places that are left.
        """
        ...


@dataclass(frozen=True)
class Root:
    """The cached part of a request: a user's history as the model reads it.

    inputs: n rows, oldest first. keys [n] int64: identity of each row; equal keys mean equal rows,
    and the prefix cache compares nothing else. shared: the first rows that all rows see (MTGR's
    profile and long history); they are cached as one piece.
    """

    inputs: NodeInputs
    keys: np.ndarray
    shared: int = 0


@dataclass(frozen=True)
class SlateQuery:
    """Generate the k best items.

    trie: the catalogue version to answer from. excluded: int item rows that must not be returned.
    allowed: of that version, None: all. dense_weight: weight of the dense head's
    log-probability beside that of the semantic id, 0: not used; with it the head's own best
    beam_width items compete with the finished beams. deadline_s: time.monotonic() value after which
    the answer is useless. graph: of similar items, for `rpg`; None: it scores all items.
    index, outcome: for `dense` and `specgr`: the vectors of the trie's items, and the share [O] of
    each outcome of its retriever in the draft (None: the retriever's own mix). caps: most items of
    each group in the slate, taken greedily from the best down; where a search finds too few that
    keep to them, it is made again without the items of full groups.
    """

    root: Root
    trie: TrieView
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

    @property
    def width(self) -> int:
        """Beams kept: as asked, and never fewer than the items wanted."""
        return max(self.beam_width, self.k)


@dataclass(frozen=True)
class RootKeys:
    """A root that is to be forgotten, and its beginnings with it.

    keys [n] int64, shared: as in Root. kept: its first rows, whose pages and roots stay.
    """

    keys: np.ndarray
    shared: int = 0
    kept: int = 0


@dataclass(frozen=True)
class LikelihoodQuery:
    """Score given items by the log-probability of their semantic ids. rows: [M] item rows."""

    root: Root
    trie: TrieView
    rows: np.ndarray
    deadline_s: float | None = None


@dataclass(frozen=True)
class RankQuery:
    """Score candidates with the ranker.

    candidates: M rows, one token each. root_limits: [M] how many root rows each candidate may see
    (those earlier than its own exposure), None: all of them.
    """

    root: Root
    candidates: NodeInputs
    root_limits: np.ndarray | None = None
    deadline_s: float | None = None


@dataclass(frozen=True)
class PrewarmQuery:
    """Compute a root, so that the next request on it pays for its tree alone."""

    root: Root
    model: Literal["recommender", "ranker"]
    deadline_s: float | None = None


@dataclass(frozen=True)
class TextScoreQuery:
    """Score label tokens after each of M given texts that share a beginning, the root.

    tokens [n] int64: the texts, packed. offsets [M + 1]: their starts; none is empty. labels [K]:
    token numbers.
    """

    root: Root
    tokens: np.ndarray
    offsets: np.ndarray
    labels: tuple[int, ...]
    deadline_s: float | None = None


Request = SlateQuery | LikelihoodQuery | RankQuery | PrewarmQuery | TextScoreQuery


@dataclass
class Timing:
    """Milliseconds a request spent in each stage of the engine; `forwards` and `nodes` count target
    work.

    root_cached and root_computed: root tokens found in the prefix cache and computed. drafted:
    whether a head proposed what was scored; `speculative` without it is beam search.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    total_ms: float = 0.0
    forwards: int = 0
    nodes: int = 0
    root_cached: int = 0
    root_computed: int = 0
    drafted: bool = False


@dataclass(frozen=True)
class Slate:
    """Answer to a SlateQuery: at most k rows, best first; fewer where fewer valid items
    exist.

    rows [k] int64, scores [k] float32. exact: equal to full beam search of the asked width, with
    caps to as many of them as were needed (search/capped.py). rounds: tree forwards of all of them.
    """

    rows: np.ndarray
    scores: np.ndarray
    exact: bool
    rounds: int
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class Continuation:
    """Another search on the same root, because caps left the slate too short.

    request: the same, but open only to items that may stand beside the chosen ones. rows [n] int64,
    scores [n] float32: what this search and those before it chose.
    """

    request: SlateQuery
    rows: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class Scores:
    """Answer to a LikelihoodQuery, RankQuery or TextScoreQuery, in the order of its
    candidates.

    values: [M, tasks] float32; task names are the model's (`likelihood` has one), or the label
    tokens, whose values are log-probabilities over the whole vocabulary.
    """

    values: np.ndarray
    tasks: tuple[str, ...]
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class Prewarmed:
    """Answer to a PrewarmQuery."""

    timing: Timing = field(default_factory=Timing)


Result = Slate | Scores | Prewarmed


class DeadlineExceeded(TimeoutError):
    """The request's deadline passed before its answer was ready."""


class QueueFull(RuntimeError):
    """The engine's queue is full. retry_after_s: when a place is likely to be free."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
