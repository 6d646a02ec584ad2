"""Builds the trees that explain slates from the rounds that a search traced."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Result, Slate
from recserve.core.slate_tree import Origin, SlateTree, TracedRound
from recserve.kernels.trie.level_search import find_keys
from recserve.kernels.trie.trie import Trie
from recserve.search.beam_search import BeamSearch
from recserve.search.trie_paths import PathDraft, level_log_probs

MAX_NODES = 512  # scored nodes of a tree, besides those on the way to the slate


def trace_round(search: BeamSearch, draft: PathDraft, origin: Origin = "search") -> None:
    """Stores which prefixes a forward pass scored, for the requests that want an explanation."""
    explained = [i for i, request in enumerate(search.requests) if request.explain]
    if not explained:
        return
    assert draft.query_keys is not None
    owners = draft.query_keys // search.trie.num_nodes
    for i in explained:
        nodes = draft.query_keys[owners == i] % search.trie.num_nodes
        search.sequences[i].traced.append(TracedRound(origin, nodes.cpu()))


def with_trees(
    results: Seq[Result | Continuation | NotFinite], search: BeamSearch
) -> list[Result | Continuation | NotFinite]:
    """Adds a tree to each slate whose request wants an explanation."""
    answers = list(results)
    for i, (request, result) in enumerate(zip(search.requests, results, strict=True)):
        if request.explain and isinstance(result, Slate):
            answers[i] = replace(result, tree=_traced_tree(search, i, result.rows))
    return answers


def slate_tree(trie: Trie, rows: np.ndarray) -> SlateTree:
    """Returns the tree of the semantic ids of a slate, without scores.

    Args:
        trie: Trie of the items.
        rows: [k] int64 item rows.
    """
    nodes = torch.unique(_paths(trie, rows))
    return _tree(trie, nodes, rows, torch.full(nodes.shape, torch.nan), [])


def _traced_tree(search: BeamSearch, index: int, rows: np.ndarray) -> SlateTree:
    trie, sequence = search.trie, search.sequences[index]
    scored = [part.nodes.to(trie.device) for part in sequence.traced]
    slate = torch.unique(_paths(trie, rows))
    nodes = torch.unique(_add_ancestors(trie, torch.cat([slate, *scored])))
    log_probs = _log_probs(search, index, nodes)
    others = nodes[~torch.isin(nodes, slate)]
    omitted = max(others.shape[0] - MAX_NODES, 0)
    if omitted:
        # A prefix is at least as likely as any prefix below it, so the likeliest ones are a tree.
        sums = _path_sums(trie, nodes, log_probs)[torch.searchsorted(nodes, others)]
        levels = trie.levels(others)
        order = np.lexsort((levels.cpu().numpy(), -sums.cpu().numpy()))
        best = others[torch.from_numpy(order[:MAX_NODES]).to(others.device)]
        kept = torch.unique(_add_ancestors(trie, torch.cat([slate, best])))
        log_probs = log_probs[torch.searchsorted(nodes, kept)]
        omitted, nodes = nodes.shape[0] - kept.shape[0], kept
    tree = _tree(trie, nodes, rows, log_probs, sequence.traced)
    return replace(tree, num_omitted=omitted)


def _tree(
    trie: Trie,
    nodes: Tensor,
    rows: np.ndarray,
    log_probs: Tensor,
    traced: list[TracedRound],
) -> SlateTree:
    """Returns the columns of ascending trie nodes [n], ordered by level and then by trie node."""
    levels = trie.levels(nodes)
    order = np.lexsort((nodes.cpu().numpy(), levels.cpu().numpy()))
    place = torch.from_numpy(order).to(nodes.device)
    nodes, levels, log_probs = nodes[place], levels[place], log_probs.to(nodes.device)[place]
    number = {node: i for i, node in enumerate(nodes.tolist())}
    parents = [number.get(node, -1) for node in trie.parents_of(nodes).tolist()]
    rounds, origins = np.zeros(len(number), np.int64), ["unscored"] * len(number)
    for count, part in enumerate(traced, start=1):
        for node in part.nodes.tolist():
            at = number.get(node)
            if at is not None and not rounds[at]:
                rounds[at], origins[at] = count, part.origin
    leaves = np.full(len(number), -1, np.int64)
    ends = _paths(trie, rows).view(len(rows), trie.num_levels)[:, -1]
    for node, row in zip(ends.tolist(), rows.tolist(), strict=True):
        leaves[number[node]] = row
    return SlateTree(
        parents=np.array(parents, np.int64),
        levels=levels.cpu().numpy().astype(np.int64) - 1,
        codes=trie.codes_of(nodes).cpu().numpy().astype(np.int64),
        log_probs=log_probs.float().cpu().numpy(),
        rounds=rounds,
        origins=tuple(origins),  # type: ignore[arg-type]
        rows=leaves,
        num_omitted=0,
    )


def _paths(trie: Trie, rows: np.ndarray) -> Tensor:
    """Returns [k * L] the trie nodes on the way to item rows [k], leaves included."""
    on_trie = torch.from_numpy(rows.astype(np.int64)).to(trie.device)
    return trie.nodes_of_items(on_trie).long().flatten()


def _add_ancestors(trie: Trie, nodes: Tensor) -> Tensor:
    """Returns nodes [n] with all nodes above them, without the empty prefix. Nodes may repeat."""
    found = [nodes]
    for _ in range(trie.num_levels):
        nodes = torch.unique(trie.parents_of(nodes).long())
        nodes = nodes[nodes > 0]
        if not nodes.shape[0]:
            break
        found.append(nodes)
    return torch.cat(found)


def _log_probs(search: BeamSearch, index: int, nodes: Tensor) -> Tensor:
    """Returns [n] log-probabilities of the codes of nodes [n] of one request, NaN if unknown."""
    trie = search.trie
    out = torch.full(nodes.shape, torch.nan, device=nodes.device)
    parents, levels = trie.parents_of(nodes).long(), trie.levels(nodes)
    row = find_keys(search.scored.keys, index * trie.num_nodes + parents)
    for level in range(trie.num_levels):
        here = (levels == level + 1).nonzero().flatten()
        if level:
            here = here[row[here] >= 0]
            states = search.scored.hidden[row[here]]
        else:
            states = search.last_hidden[index].expand(here.shape[0], -1)
        if not here.shape[0]:
            continue
        children = trie.children(parents[here], trie.padding(level))
        found = level_log_probs(search.model, states, level, children.codes.long(), children.valid)
        place = trie.child_columns(nodes[here], parents[here]).long()
        out[here] = found.gather(1, place[:, None])[:, 0].float()
    if search.skip_single:
        out[(trie.num_children(parents) == 1) & out.isnan()] = 0.0
    return out


def _path_sums(trie: Trie, nodes: Tensor, log_probs: Tensor) -> Tensor:
    """Returns [n] sums of log-probabilities from the root to each of the ascending nodes [n]."""
    sums, above = log_probs.nan_to_num(-torch.inf), trie.parents_of(nodes).long()
    for _ in range(trie.num_levels):
        inside = above > 0
        at = torch.searchsorted(nodes, above.clamp(min=1)).clamp(max=nodes.shape[0] - 1)
        sums = sums + torch.where(inside, log_probs[at].nan_to_num(-torch.inf), 0.0)
        above = torch.where(inside, trie.parents_of(above.clamp(min=0)).long(), 0)
    return sums
