"""Slates for many histories: from the engine as a server would make them, and from baselines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.request import Prefix, PrefixKeys, Request, Slate, SlateQuery, VectorIndex
from recserve.engine.build import EngineModels, build_engine
from recserve.evaluation.cases import Cases
from recserve.features.tables.encoding import window_start
from recserve.kernels.item_graph import ItemGraph
from recserve.kernels.trie.trie import Trie
from recserve.models.attention import DenseAttention
from recserve.models.inputs import NodeInputs
from recserve.models.prefix_template import PrefixTemplate
from recserve.models.sasrec import SasRec
from recserve.models.scoring import Scoring
from recserve.models.semantic_id_model import SemanticIdModel, item_tables
from recserve.search.strategy import Heads

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SlateOptions:
    """How slates are made.

    Attributes:
        width: Beam width.
        filtered: True excludes the items of the history.
        dense_weight: Weight of the dense head's log-probability when finished beams are ranked.
        strategy: Name of an engine strategy.
        graph: Graph of similar items for `rpg`; None scores all items.
        outcome: [O] mix of outcomes for `dense`; None means the retriever's own.
        scoring: How `beam` scores items; None means as the model says.
    """

    width: int = 50
    filtered: bool = True
    dense_weight: float = 0.0
    strategy: str = "beam"
    graph: ItemGraph | None = None
    outcome: NDArray[np.float64] | None = None
    scoring: Scoring | None = None


class Slates:
    """Makes slates for cases with an engine, as a server with this model would."""

    def __init__(
        self,
        model: SemanticIdModel,
        trie: Trie,
        codes: NDArray[np.generic],
        heads: Heads | None = None,
        index: VectorIndex | None = None,
    ) -> None:
        """Builds the engine, which reads the current weights.

        Args:
            model: The recommender.
            trie: Trie of the semantic ids, on the model's device.
            codes: [I, L] semantic ids of the items.
            heads: Draft heads and retriever; None means none.
            index: Vector index of the items for `dense`.
        """
        self.model, self.trie, self.codes, self.index = model, trie, codes, index
        model.pack_search()
        for head in (heads.prefixes, heads.nezha) if heads else ():
            if head is not None:
                head.pack()
        self.engine = build_engine(EngineModels(model, heads=heads or Heads()))

    def __call__(self, cases: Cases, which: Ints, k: int, options: SlateOptions) -> Ints:
        """Returns [n, k] item rows of the cases `which`, best first, -1 after a slate's end."""
        return rows_of(self.answers(cases, which, k, options), k)

    def answers(self, cases: Cases, which: Ints, k: int, options: SlateOptions) -> list[Slate]:
        """Returns the engine's slates of the cases `which`, with scores and timing."""
        requests: list[Request] = [
            self._request(cases, case, k, options) for case in which.tolist()
        ]
        return [answer for answer in self.engine.run_many(requests) if isinstance(answer, Slate)]

    def forget(self, cases: Cases, which: Ints) -> None:
        """Drops the prefixes of these cases from the engine's cache, which makes them cold."""
        for case in which.tolist():
            self.engine.forget(PrefixKeys(prefix_tokens(self.model, self.codes, cases, case)))

    def _request(self, cases: Cases, case: int, k: int, options: SlateOptions) -> SlateQuery:
        tokens = prefix_tokens(self.model, self.codes, cases, case)
        inputs = NodeInputs(torch.from_numpy(tokens).to(self.trie.device))
        return SlateQuery(
            prefix=Prefix(inputs, tokens),
            trie=self.trie,
            k=k,
            beam_width=options.width,
            strategy=options.strategy,
            excluded=cases.history(case) if options.filtered else None,
            dense_weight=options.dense_weight,
            graph=options.graph,
            index=self.index,
            outcome=options.outcome,
            scoring=options.scoring,
        )


def rows_of(answers: list[Slate], k: int) -> Ints:
    """Returns [n, k] item rows of the slates, best first, -1 after the end of a slate."""
    slates = np.full((len(answers), k), -1, dtype=np.int64)
    for slate, answer in zip(slates, answers, strict=True):
        slate[: len(answer.rows)] = answer.rows
    return slates


def prefix_tokens(
    model: SemanticIdModel, codes: NDArray[np.generic], cases: Cases, case: int
) -> Ints:
    """Returns the tokens of a case's prefix, as the server makes them. codes: [I, L]."""
    rows = model_window(cases.history(case), model.template)
    return model.template.tokens(rows, codes, cases.user_id(case))


def model_window(history: Ints, template: PrefixTemplate) -> Ints:
    """Returns the part of a history that the model reads, cut as in the server."""
    return history[window_start(len(history), template.max_items, template.block) :]


@torch.no_grad()
def dense_log_p(
    model: SemanticIdModel, codes: NDArray[np.generic], cases: Cases, which: Ints
) -> NDArray[np.float32]:
    """Returns the log-probability of every item under the dense head, after each history.

    Args:
        model: A recommender with a dense head.
        codes: [I, L] semantic ids of the items.
        cases: The cases.
        which: Numbers of n cases.

    Returns:
        [n, I] float32 log-probabilities.
    """
    device = model.tokens.weight.device
    prefixes = [
        torch.from_numpy(prefix_tokens(model, codes, cases, case)) for case in which.tolist()
    ]
    tokens = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True).to(device)
    positions = torch.arange(tokens.shape[1], device=device)
    hidden = model.decoder(model.embed(tokens), positions, DenseAttention())
    last = torch.tensor([len(prefix) - 1 for prefix in prefixes], device=device)
    states = hidden[torch.arange(len(prefixes), device=device), last]
    log_p: NDArray[np.float32] = item_tables(model).dense_scores(states).cpu().numpy()
    return log_p


def dense_slates(
    model: SemanticIdModel,
    codes: NDArray[np.generic],
    cases: Cases,
    which: Ints,
    k: int,
    filtered: bool,
) -> Ints:
    """Returns slates of the dense head alone.

    Args:
        model: A recommender with a dense head.
        codes: [I, L] semantic ids of the items.
        cases: The cases.
        which: Numbers of n cases.
        k: Number of items in a slate.
        filtered: True excludes the items of the history.

    Returns:
        [n, k] item rows, best first.
    """
    scores = torch.from_numpy(dense_log_p(model, codes, cases, which))
    return best_items(scores, cases, which, k, filtered)


@torch.no_grad()
def sasrec_slates(model: SasRec, cases: Cases, which: Ints, k: int, filtered: bool) -> Ints:
    """Returns [n, k] item rows from SASRec for the cases `which`, best first."""
    device = model.ids.weight.device
    rows = torch.from_numpy(cases.histories(which, model.config.max_history_items)).to(device)
    last = (rows >= 0).sum(1) - 1
    hidden = model(rows.clamp(min=0))[torch.arange(rows.shape[0], device=device), last]
    return best_items(model.scores(hidden), cases, which, k, filtered)


def best_items(scores: Tensor, cases: Cases, which: Ints, k: int, filtered: bool) -> Ints:
    """Returns the rows of the best items.

    Args:
        scores: [n, I] scores; excluded entries are overwritten with -inf.
        cases: The cases.
        which: Numbers of n cases.
        k: Number of items in a slate.
        filtered: True excludes the items of the history.

    Returns:
        [n, min(k, I)] item rows, best first.
    """
    if filtered:
        seen = torch.from_numpy(cases.histories(which)).to(scores.device)
        case, place = (seen >= 0).nonzero(as_tuple=True)
        scores[case, seen[case, place]] = -torch.inf
    rows: Ints = scores.topk(min(k, scores.shape[1]), dim=1).indices.cpu().numpy()
    return rows
