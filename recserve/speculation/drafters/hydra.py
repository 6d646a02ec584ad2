"""Hydra: heads that read the drafted tokens give a dynamic tree.

Head i gives the children of the nodes at level i. Which tokens it ranks first depends on the path,
so the tree keeps the likeliest nodes by the product of probabilities, as EAGLE-2's does. At a
temperature above 0 the tokens of each position are ranked with the target's own noise.

Sources: Hydra (arXiv 2402.05109) for the heads; EAGLE-2 (arXiv 2406.16858, section 4) for the tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.paged_kv import KVPool, KVShape, TreeBatch
from recserve.kernels.tree import chain, merge
from recserve.models.attention import PagedAttention
from recserve.models.drafters.hydra import Hydra
from recserve.models.drafters.hydra_files import load_hydra
from recserve.models.language_model import LanguageModel
from recserve.models.packing import pack_weights
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, StateSpan, TextContext
from recserve.speculation.drafters.limits import allowed, only_chains
from recserve.speculation.drafters.noisy import DraftedTexts, likeliest
from recserve.speculation.drafters.score_tree import ScoreTree

WIDTH, NUM_NODES = 8, 32
MAX_TEXTS = 64  # texts that are drafted together


class HydraDrafter(Drafter):
    """Drafts dynamic trees with Hydra's heads.

    Args:
        network: The heads.
        target: The model that verifies. Its embedding is the heads'.
        width: Children of a node, and nodes that each level extends.
        num_nodes: Nodes of the tree.

    Raises:
        ValueError: If the heads are for another target.
    """

    name = "hydra"
    needs_weights = True
    num_folders = 1
    reads_states = True

    def __init__(
        self,
        network: Hydra,
        target: LanguageModel,
        width: int = WIDTH,
        num_nodes: int = NUM_NODES,
    ) -> None:
        config, own = network.config, target.config
        given = config.decoder.hidden_size, config.vocab_size
        if given != (own.decoder.hidden_size, own.vocab_size):
            raise ValueError(
                f"the heads are for hidden size {given[0]} and {given[1]} tokens, the target has "
                f"{own.decoder.hidden_size} and {own.vocab_size}"
            )
        self.network, self.target = network, target
        self.width, self.num_nodes = min(width, own.vocab_size), num_nodes
        self.hidden_layers = (config.layer,)
        decoder = config.decoder
        if config.prefix:
            self.kv_shape = KVShape(1, decoder.num_kv_heads, decoder.head_dim)
        # What the heads read at the state before the last committed token of each text, and how
        # many tokens the text had then.
        self._outputs: dict[int, tuple[int, Tensor]] = {}

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> HydraDrafter:
        """Loads the heads of one folder."""
        if len(folders) != 1:
            raise ValueError("drafter 'hydra' needs the folder of its heads (hydra=DIR)")
        network = load_hydra(folders[0], target)
        pack_weights(network)
        return cls(network, target)

    def attach(self, pool: KVPool) -> None:
        """Receives the pool of the prefix layer's keys and values."""
        self.pool = pool

    def forget(self, context_id: int) -> None:
        """Drops the state of a text."""
        self._outputs.pop(context_id, None)

    @torch.inference_mode()
    def read(self, parts: Seq[StateSpan]) -> None:
        """Keeps the last state of each text; Hydra++ runs its layer over all new states."""
        if self.network.prefix is None:
            outputs = [part.states[-1] for part in parts]
        else:
            outputs = self._through_prefix(parts)
        for part, output in zip(parts, outputs, strict=True):
            length = part.first + part.states.shape[0] + 1
            self._outputs[part.context.id] = length, output

    def _through_prefix(self, parts: Seq[StateSpan]) -> list[Tensor]:
        """Returns the prefix layer's output [E] at the last state of each part.

        The entry of the state at position p lies in the slot of p + 1.
        """
        assert self.network.prefix is not None
        slots, roots, trees, ends = [], [], [], []
        device, stop = self.pool.keys.device, 0
        for part in parts:
            first, size, own = part.first, part.states.shape[0], part.context.slots
            assert own is not None
            tokens = part.context.tokens[first + 1 : first + 1 + size]
            trees.append(chain(on_device(tokens, device)))
            slots.append(own[first + 1 : first + 1 + size])
            roots.append(own[1 : first + 1])
            stop += size
            ends.append(stop - 1)
        batch = TreeBatch(merge(trees), None, torch.cat(slots), tuple(roots))
        states = torch.cat([part.states for part in parts])
        rows = on_device(ends, device)
        attend = PagedAttention(batch, self.pool)
        return list(self.network.prefix(states, batch.positions(), attend, rows))

    @torch.inference_mode()
    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns one tree per text; empty while the state before its last token is unknown."""
        drafts = [empty_draft(self.target.tokens.weight.device)] * len(contexts)
        groups: dict[int, list[int]] = {}
        limits = []
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            width = 1 if only_chains(context) else self.width
            most = allowed(context, budget, self.num_nodes)
            limits.append(Budget(most.num_nodes, min(most.depth, self.network.config.num_heads)))
            known = self._outputs.get(context.id, (0, None))[0] == len(context.tokens)
            if known and limits[i].num_nodes and limits[i].depth:
                groups.setdefault(width, []).append(i)
        for width, rows in groups.items():
            for start in range(0, len(rows), MAX_TEXTS):
                some = rows[start : start + MAX_TEXTS]
                made = self._draft([contexts[i] for i in some], [limits[i] for i in some], width)
                for i, draft in zip(some, made, strict=True):
                    drafts[i] = draft
        return drafts

    def _draft(
        self, contexts: Seq[TextContext], budgets: Seq[Budget], width: int
    ) -> list[TextDraft]:
        """Expands trees level by level and keeps their likeliest nodes."""
        embed = self.target.tokens
        device = embed.weight.device
        texts = DraftedTexts.of(contexts, device)
        depth = max(budget.depth for budget in budgets)
        tree = ScoreTree(len(contexts), width, depth, device)
        last = embed(on_device([context.tokens[-1] for context in contexts], device))
        states = torch.stack([self._outputs[context.id][1] for context in contexts])
        inputs = torch.cat([states, last], dim=-1)[:, None]  # [B, W, (level + 2) E]
        for level in range(depth):
            logits = self.network.logits(level, inputs).float()
            found = likeliest(logits, texts, level, width)
            parents = tree.grow(found.columns, found.values)
            if level + 1 < depth:
                above = inputs.gather(1, parents[..., None].expand(-1, -1, inputs.shape[-1]))
                inputs = torch.cat([above, embed(tree.frontier_tokens)], dim=-1)
        return tree.best(budgets)
