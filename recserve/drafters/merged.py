"""Several drafters in one tree. Equal prefixes share their nodes.

Chosen drafts are merged token by token. Drawn drafts stay separate subtrees: if two of them drew
the same token, a rule that compares p with q tries it twice.

Source: SpecInfer (arXiv 2305.09781, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice

import torch

from recserve.drafters.shared.draft_tree import ROOT, DraftTree
from recserve.drafters.shared.limits import limit_budget, only_chains
from recserve.kernels.host import on_device
from recserve.kernels.tree import CANDIDATE
from recserve.models.adapters import DecoderAdapter
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, RankedHeads, StateSpan, TextContext, TextOutcome
from recserve.speculation.sampling_params import Speculation

NO_LIMIT = 2**30


@dataclass(frozen=True)
class Part:
    """One source's draft, as a part of a merged draft.

    Attributes:
        draft: The source's draft with n nodes.
        places: [n] index of each node in the merged draft.
    """

    draft: TextDraft
    places: list[int]


class MergedDrafter(Drafter):
    """Merges the drafts of several sources.

    The sources draft in order, and each may use an equal share of the remaining nodes. Under rules
    for chains, only the first non-empty draft is used. If some drafts are drawn and others chosen,
    all are merged as chosen.

    Args:
        sources: At least two drafters.

    Raises:
        ValueError: If there are fewer than two sources.
    """

    def __init__(self, sources: Seq[Drafter]) -> None:
        if len(sources) < 2:
            raise ValueError(f"{len(sources)} drafters to merge; name at least two")
        self.sources = tuple(sources)
        self.draws = any(source.draws for source in sources)
        self.takes_tree = any(source.takes_tree for source in sources)
        self._parts: dict[int, list[Part]] = {}
        self._readers = [source for source in self.sources if source.reads_states]
        self.reads_states = bool(self._readers)
        self.hidden_layers = tuple(n for source in self._readers for n in source.hidden_layers)

    @property
    def always_draws(self) -> bool:
        """True if all sources draw. A drawn and a chosen draft are merged as chosen."""
        return all(source.always_draws for source in self.sources)

    @property
    def parts(self) -> Seq[Drafter]:
        """The parts of all sources."""
        return [part for source in self.sources for part in source.parts]

    @property
    def ranked_heads(self) -> RankedHeads | None:
        """Heads of the only source that has any; None if several sources have heads."""
        found = [heads for source in self.sources if (heads := source.ranked_heads)]
        return found[0] if len(found) == 1 else None

    def check_tree(self, speculation: Speculation) -> None:
        """Raises ValueError if a source that takes trees cannot fill this one."""
        for source in self.sources:
            if source.takes_tree:
                source.check_tree(speculation)

    def adapt_target(self, adapter: DecoderAdapter) -> DecoderAdapter:
        """Returns the target as all sources need it."""
        for source in self.sources:
            adapter = source.adapt_target(adapter)
        return adapter

    def read(self, parts: Seq[StateSpan]) -> None:
        """Passes its layers' states to each source that reads states."""
        total, first = max(len(self.hidden_layers), 1), 0
        for source in self._readers:
            stop = first + len(source.hidden_layers)
            own = []
            for part in parts:
                size = part.states.shape[1] // total
                own.append(replace(part, states=part.states[:, first * size : stop * size]))
            source.read(own)
            first = stop

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns one tree per context."""
        limits = [limit_budget(c, b, NO_LIMIT) for c, b in zip(contexts, budgets, strict=True)]
        found: list[list[TextDraft]] = [[] for _ in contexts]
        for number, source in enumerate(self.sources):
            rest = len(self.sources) - number
            shares = []
            for context, limit, own in zip(contexts, limits, found, strict=True):
                used = sum(map(len, own))
                left = limit.num_nodes - used
                # -(-a // b) rounds the share up.
                if only_chains(context):
                    shares.append(Budget(0 if used else left, limit.depth))
                else:
                    shares.append(Budget(-(-left // rest), limit.depth))
            for own, draft in zip(found, source.propose(contexts, shares), strict=True):
                own.append(draft)
        merged: list[TextDraft | None] = [_without_merging(own) for own in found]
        mixed = [row for row, draft in enumerate(merged) if draft is None]
        places = [_side_by_side(own) for own in found]
        for row, (draft, own_places) in zip(
            mixed, _merge([found[row] for row in mixed]), strict=True
        ):
            merged[row], places[row] = draft, own_places
        for context, own, own_places in zip(contexts, found, places, strict=True):
            parts = [Part(draft, place) for draft, place in zip(own, own_places, strict=True)]
            self._parts[context.id] = parts
        return [draft for draft in merged if draft is not None]

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Passes to every source the outcome of its own nodes."""
        for number, source in enumerate(self.sources):
            own = [
                _outcome_of(outcome, self._parts[outcome.context.id][number])
                for outcome in outcomes
                if outcome.context.id in self._parts
            ]
            source.commit(own)

    def forget(self, context_id: int) -> None:
        """Drops the sequence's state, here and in every source."""
        self._parts.pop(context_id, None)
        for source in self.sources:
            source.forget(context_id)


def _side_by_side(drafts: Seq[TextDraft]) -> list[list[int]]:
    """Returns each node's index in the concatenation of the drafts."""
    starts = [sum(map(len, drafts[:i])) for i in range(len(drafts))]
    return [list(range(s, s + len(d))) for s, d in zip(starts, drafts, strict=True)]


def _without_merging(drafts: Seq[TextDraft]) -> TextDraft | None:
    """Joins drafts whose nodes need no comparison.

    Returns:
        The only non-empty draft, or the concatenation of drawn drafts; None for all others.
    """
    some = [draft for draft in drafts if len(draft)]
    if len(some) < 2:
        return some[0] if some else drafts[0]
    parents, probs, start = [], [], 0
    for draft in some:
        if draft.probs is None:
            return None
        parents.append(torch.where(draft.parents >= 0, draft.parents + start, ROOT))
        start += len(draft)
        probs.append(draft.probs)
    return TextDraft(
        torch.cat([draft.tokens for draft in some]),
        torch.cat(parents),
        max(draft.depth for draft in some),
        torch.cat(probs),
    )


def _merge(groups: Seq[Seq[TextDraft]]) -> list[tuple[TextDraft, list[list[int]]]]:
    """Merges groups of drafts token by token, on the host, all groups at once.

    Returns:
        Per group, the merged draft, and for each of its drafts the nodes' indices in the merged
        one.
    """
    rows = iter(_rows([draft for drafts in groups for draft in drafts]))
    trees, nodes = [], []
    for drafts in groups:
        tree = DraftTree()
        own = [_add(tree, next(rows)) for _ in drafts]
        trees.append(tree)
        nodes.append(own)
    orders = [tree.preorder() for tree in trees]
    made = [tree.finish(order) for tree, order in zip(trees, orders, strict=True)]
    merged = []
    for draft, order, own in zip(made, orders, nodes, strict=True):
        place = {node: i for i, node in enumerate(order)}
        merged.append((draft, [[place[node] for node in part] for part in own]))
    return merged


def _rows(drafts: Seq[TextDraft]) -> list[list[list[int]]]:
    """Returns (token, parent, kind) of each draft's nodes, with a single copy from the device."""
    rows: list[list[list[int]]] = [[] for _ in drafts]
    for on_host in (True, False):
        own = [n for n, draft in enumerate(drafts) if draft.tokens.is_cpu == on_host]
        if not own:
            continue
        some = [drafts[n] for n in own]
        columns = [torch.stack([d.tokens, d.parents, _kinds(d)], dim=1) for d in some]
        nodes = iter(torch.cat(columns).tolist())
        for n in own:
            rows[n] = list(islice(nodes, len(drafts[n])))
    return rows


def _kinds(draft: TextDraft) -> torch.Tensor:
    return torch.full_like(draft.tokens, CANDIDATE) if draft.kinds is None else draft.kinds


def _add(tree: DraftTree, rows: Iterable[Seq[int]]) -> list[int]:
    """Adds one source's nodes to the tree.

    Args:
        tree: The merged tree.
        rows: (token, parent, kind) of each node, in preorder.

    Returns:
        Number of each node in the tree.
    """
    nodes: list[int] = []
    for token, parent, kind in rows:
        above = ROOT if parent < 0 else nodes[parent]
        if kind == CANDIDATE:
            nodes.append(tree.add(above, token))
        else:
            nodes.append(tree.add_auxiliary(above, token, kind))
    return nodes


def _outcome_of(outcome: TextOutcome, part: Part) -> TextOutcome:
    """Returns the part of an outcome that concerns one source's nodes."""
    if not len(outcome.draft):
        return replace(outcome, draft=empty_draft(part.draft.tokens.device), rows=None)
    number = {place: node for node, place in enumerate(part.places)}
    accepted = tuple(number[node] for node in outcome.accepted if node in number)
    # Row 0 is the last committed token; row 1 + place is a draft node.
    rows = on_device([0, *(place + 1 for place in part.places)], outcome.logits.device)
    return replace(
        outcome,
        draft=part.draft,
        accepted=accepted,
        all_hidden=outcome.hidden[rows],
        all_logits=outcome.logits[rows],
        first=0,
        rows=None,
    )
