"""A text step after its forward pass: acceptance, moves of accepted paths, and the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.engine.text_trees import drawn_rows
from recserve.kernels.acceptance import acceptance
from recserve.kernels.acceptance.acceptance import DraftProbs
from recserve.kernels.acceptance.masks import TokenMasks
from recserve.kernels.cache import moves as path_moves
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.decoder import FINAL_LAYER, AuxHiddenStates
from recserve.models.language_model import LanguageModel
from recserve.speculation.completion import TokenLogprobs
from recserve.speculation.draft import TextDraft
from recserve.speculation.drafter import Drafter
from recserve.speculation.logits_processor import LogitsProcessor, TextColumns, TokenCounts
from recserve.speculation.sampling_table import SamplingTable
from recserve.speculation.verifier import Accepted, ScoredTrees
from recserve.speculation.verifiers.registry import verify


@dataclass(frozen=True)
class NodeStates:
    """States of T nodes.

    Attributes:
        final: [T, E] final hidden states.
        between: [T, E] residual stream after the first n layers, by n. Only recorded layers.
    """

    final: Tensor
    between: Mapping[int, Tensor] = field(default_factory=dict)

    def layers_of(self, drafter: Drafter) -> list[Tensor]:
        """Returns [T, E] states of each layer that a drafter reads."""
        layers = drafter.hidden_layers
        return [self.final if n == FINAL_LAYER else self.between[n] for n in layers]

    def read_by(self, drafter: Drafter, nodes: Seq[int] | slice) -> Tensor:
        """Returns [n, F] the layers that a drafter reads, side by side, in memory of their own."""
        rows = nodes if isinstance(nodes, slice) else on_device(nodes, self.final.device)
        columns = [column[rows] for column in self.layers_of(drafter)]
        return torch.cat(columns, dim=-1) if columns else self.final[rows, :0]


@dataclass(frozen=True)
class StateRows:
    """States of a step at the nodes of a text's path, which a captured draft reads from there.

    Another step may overwrite them. By then the drafter has received them.

    Attributes:
        source: States of the step.
        drafter: Drafter of the text.
        nodes: The nodes.
    """

    source: NodeStates
    drafter: Drafter
    nodes: list[int]

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, places: slice) -> Tensor:
        """Returns [n, F] the states at some of the nodes, in memory of their own."""
        return self.source.read_by(self.drafter, self.nodes[places])


def aux_states_for(drafters: Iterable[Drafter]) -> AuxHiddenStates | None:
    """Returns a record for all layers that the drafters read, or None if they read none."""
    layers = {n for drafter in drafters if drafter.reads_states for n in drafter.hidden_layers}
    layers.discard(FINAL_LAYER)
    return AuxHiddenStates(tuple(sorted(layers))) if layers else None


def split_states(hidden: Seq[Tensor], aux_states: AuxHiddenStates | None) -> list[NodeStates]:
    """Returns the states of each part of a forward pass.

    Args:
        hidden: [T, E] final states of each part.
        aux_states: What was recorded for all parts together. None if nothing was.
    """
    if aux_states is None:
        return [NodeStates(own) for own in hidden]
    sizes = [own.shape[0] for own in hidden]
    columns = [torch.split(states, sizes) for states in aux_states.states]
    between = [dict(zip(aux_states.layers, own, strict=True)) for own in zip(*columns, strict=True)]
    return [NodeStates(own, layers) for own, layers in zip(hidden, between, strict=True)]


@dataclass(frozen=True)
class VerifiedPaths:
    """The accepted paths of B texts, on the host.

    Attributes:
        paths: The packed nodes of each path, node 0 first.
        tokens: The tokens of each path, the bonus token last.
        ranked: [B, K, W] tokens that K heads ranked at the end of the step. None without heads.
        nonfinite: Numbers of the texts whose logits on the path are not finite. Their tokens mean
            nothing.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
    ranked: NDArray[np.int64] | None = None
    nonfinite: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step for B texts, on the device.

    Attributes:
        results: [B, 2 D + 5 + K W] int64: the paths as `pack_paths` returns them, then K W tokens
            that K heads rank for the next draft. One copy brings them to the host.
        depth: D, most levels below a node 0.
        logits: [T, V] raw logits of all nodes.
        states: States of all nodes.
        num_heads: K, or 0 without heads.
        last_hidden: [E] state of each text at its last accepted node, which stays until the text
            steps again. None if only `states` has it.
    """

    results: Tensor
    depth: int
    logits: Tensor
    states: NodeStates
    num_heads: int = 0
    last_hidden: Seq[Tensor] | None = None

    @property
    def accepted(self) -> Accepted:
        """The accepted nodes."""
        return Accepted.unpack(self.results, self.depth)

    @property
    def tokens(self) -> Tensor:
        """[B, D + 1] tokens of the accepted nodes. Values after the last have no meaning."""
        return self.results[:, self.depth + 3 : 2 * self.depth + 4]

    def paths(self) -> VerifiedPaths:
        """Copies the results to the host and returns the accepted paths.

        This is the only read of the device in a step, because the accepted tokens decide the next
        step.
        """
        rows, ranked, nodes = self.results.cpu(), None, self.depth + 1
        flag_at = 2 * nodes + 2
        if self.num_heads:
            own = rows[:, flag_at + 1 :].numpy().copy()
            ranked = own.reshape(len(rows), self.num_heads, -1)
            rows = rows[:, : flag_at + 1]
        first_token = nodes + 3  # the token of node 0 was committed before
        paths, tokens, nonfinite = [], [], []
        for number, row in enumerate(rows.tolist()):
            if row[flag_at]:
                nonfinite.append(number)
            length, bonus = row[nodes : nodes + 2]
            paths.append(row[: length + 1])
            text = row[first_token : first_token + length]
            text.append(bonus)
            tokens.append(text)
        return VerifiedPaths(paths, tokens, ranked, frozenset(nonfinite))


@dataclass(frozen=True)
class StepInputs:
    """What a step reads of B texts, besides their trees and the states of the nodes.

    A captured step has these in buffers, padded to fixed sizes. A launched one has exact sizes.

    Attributes:
        rule: Acceptance rule of all texts, or MIXED.
        depth: D, most levels below a node 0.
        forks: Whether a tree may fork. The paths of others lie in their final slots already.
        table: Sampling parameters.
        texts: The committed tokens of the texts.
        counts: Where accepted tokens are counted. None: no text has penalties.
        probs: Distributions that the nodes were drawn from. None: all tokens were chosen.
        rules: [B] number of each text's rule. None: `rule` is that of all texts.
        masks: Tokens that the constraints of texts allow after each node. None: no text has one.
    """

    rule: str
    depth: int
    forks: bool
    table: SamplingTable
    texts: TextColumns
    counts: TokenCounts | None = None
    probs: DraftProbs | None = None
    rules: Tensor | None = None
    masks: TokenMasks | None = None


def text_step(
    model: LanguageModel, pool: KVPool, batch: TreeBatch, inputs: StepInputs, states: NodeStates
) -> StepOutputs:
    """Does what follows the forward pass of a text step: logits, acceptance and moves.

    It is one function for launched and for captured steps. On a device, and in a captured step, no
    shape may depend on a draw, and the host may not wait. On a CPU, reading a number is free, and a
    rule then draws along the path only instead of at all nodes.

    Args:
        model: The target.
        pool: Its key-value pool.
        batch: B packed trees with T nodes, all of them computed now.
        inputs: The texts of the trees.
        states: States of the T nodes.
    """
    tree, depth, table, texts = batch.tree, inputs.depth, inputs.table, inputs.texts
    logits, past = model.logits(states.final), texts.past(table, inputs.counts)
    fixed = batch.fixed_shapes or batch.slots.is_cuda
    alone = past is None and (table.greedy or not table.truncates) and inputs.masks is None
    scored = ScoredTrees(
        tree=tree,
        depth=depth,
        target=LogitsProcessor(logits, tree, depth, table, past, fixed, inputs.masks),
        seeds=table.seeds,
        lengths=texts.lengths,
        vocab_size=logits.shape[1],
        probs=inputs.probs,
        greedy=table.greedy,
        logits=logits if alone else None,
        temperatures=table.temperature,
        fixed_shapes=fixed,
        rules=inputs.rules,
    )
    accepted = verify(inputs.rule, scored)
    if inputs.masks is not None:  # a row without a token left draws none
        bonus = accepted.bonus.clamp(max=logits.shape[1] - 1)
        accepted = replace(accepted, bonus=bonus, packed=None)
    results = accepted.packed
    if results is None:
        results = acceptance.pack_paths(accepted, tree, logits)
    outputs = StepOutputs(results, depth, logits, states)
    if inputs.forks:
        move_accepted(pool, tree, accepted, batch.slots)
    if inputs.counts is not None:
        bonus = accepted.bonus[:, None]
        tokens = torch.cat([outputs.tokens[:, 1:], bonus], 1)
        inputs.counts.add(texts.rows, tokens, torch.cat([accepted.nodes[:, 1:], bonus], 1) >= 0)
    return outputs


def draft_probs(drafts: Seq[TextDraft], device: torch.device) -> DraftProbs | None:
    """Returns the draft probabilities of every packed node, or None if no draft was drawn.

    They are float32 for any logits, because the draft's tokens were drawn from those exact values.
    """
    drawn = [draft.probs for draft in drafts if draft.probs is not None]
    if not drawn:
        return None
    values = torch.empty(sum(map(len, drawn)), drawn[0].shape[1], device=device)
    put_probs(drafts, values)
    return DraftProbs(values, on_device(drawn_rows(drafts), device))


def put_probs(drafts: Seq[TextDraft], values: Tensor) -> None:
    """Copies the probabilities of drawn drafts to the first rows of `values` [R, V]."""
    drawn = [
        draft.probs.to(values.device, non_blocking=True)
        for draft in drafts
        if draft.probs is not None
    ]
    if drawn:
        torch.cat(drawn, out=values[: sum(map(len, drawn))])


def move_accepted(pool: KVPool, tree: TokenTree, accepted: Accepted, slots: Tensor) -> None:
    """Moves keys and values of accepted paths to the slots right after node 0 of their trees.

    Args:
        pool: The key-value pool.
        tree: The packed trees.
        accepted: The accepted nodes.
        slots: [T] slot of each packed node.
    """
    nodes = accepted.nodes[:, 1:]
    step = torch.arange(1, nodes.shape[1] + 1, device=nodes.device)
    # Places after the end of a path are not read, so any valid index will do.
    place = (tree.offsets[:-1, None] + step).clamp(max=tree.num_nodes - 1)
    sources, targets = slots[nodes.clamp(min=0)], slots[place]
    path_moves.move_paths(pool.keys, pool.values, sources, targets, accepted.lengths)


def token_logprobs(
    logits: Tensor, rows: Seq[int], tokens: Seq[int], top: int
) -> list[TokenLogprobs]:
    """Returns the log-probabilities to report for written tokens.

    Args:
        logits: [T, V] raw logits.
        rows: The n rows that the tokens were drawn from.
        tokens: The n tokens.
        top: Number of most likely tokens to report besides each token.
    """
    log_p = logits[on_device(rows, logits.device)].float().log_softmax(-1)
    chosen = log_p.gather(1, on_device(tokens, logits.device)[:, None])[:, 0].tolist()
    best = log_p.topk(min(top, log_p.shape[1]), dim=1)
    return [
        TokenLogprobs(own, tuple(names), tuple(values))
        for own, names, values in zip(
            chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
