"""Training of block drafters, which draft for a frozen target model.

Each training row gets random anchors, and a block of masks after each of them. All blocks of a row
run in one packed pass: a block sees the row before its anchor and itself.

    row        0 1 2 3 4 5 6 7 8 9 ...      block at 2 sees 0 1 | 2 m m m
    anchors        2       6                block at 6 sees 0 1 2 3 4 5 | 6 m m m

The loss compares the network's distribution in slot j with the target's at that position, with the
weight exp(-j / gamma), because a later token counts only after all earlier ones.

Sources: DFlash (arXiv 2602.06036, anchors and weights), DSpark (arXiv 2607.05147, total variation),
speculators (models/dflash2, selector), DeepSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recserve.drafters.block.files import load_block, save_block
from recserve.drafters.block.heads import pair_scores
from recserve.drafters.block.network import Block
from recserve.models.attention import Attend, DenseAttention
from recserve.models.decoder import AuxHiddenStates
from recserve.training.loop import StepLoss
from recserve.training.text.drafters.block_recipe import BlockRecipe, block_config
from recserve.training.text.drafters.trainee import DrafterTrainee, accept_metrics

LIKELIHOOD_WEIGHT = 0.1  # of DSpark's loss; the rest is the total variation


@dataclass(frozen=True)
class BlockAttention(Attend):
    """Attention of packed blocks to their row's context and to themselves, for one layer.

    Attributes:
        key: [B, T, K, D] keys of the context.
        value: [B, T, K, D] values of the context.
        mask: [B, 1, n S, T + n S] bool.
    """

    key: Tensor
    value: Tensor
    mask: Tensor

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends with query [B, n S, H, D], key and value [B, n S, K, D]."""
        keys = torch.cat([self.key, key], dim=1)
        values = torch.cat([self.value, value], dim=1)
        return DenseAttention(self.mask)(layer, query, keys, values)


@dataclass(frozen=True)
class _Said:
    """What a network says about the slots of n blocks per row.

    Attributes:
        unary: [B, n, K, V] float32 logits without the tokens between.
        scores: [B, n, K, C] float32 scores given the token before: all tokens, or the candidates.
        columns: [B, n, K, C] candidates of a selector; None means that `scores` are for all tokens.
    """

    unary: Tensor
    scores: Tensor
    columns: Tensor | None

    def best(self) -> Tensor:
        """Returns the likeliest tokens [B, n, K]."""
        best = self.scores.argmax(-1, keepdim=True)
        return (best if self.columns is None else self.columns.gather(-1, best))[..., 0]


class BlockTrainee(DrafterTrainee[BlockRecipe, Block]):
    """A block drafter on a frozen target, for the training loop."""

    def new_network(self, train: NDArray[np.int64]) -> Block:
        """Returns a network whose norm is the target's and whose mask is the mean of all tokens.

        Raises:
            ValueError: If a window is shorter than a block.
        """
        recipe, target = self.recipe, self.target
        network = Block(block_config(recipe, target)).to(self.device)
        self.last_anchor = recipe.window - network.config.num_slots
        if self.last_anchor < 1:
            raise ValueError(f"window is {recipe.window}; a block has {recipe.block_size} rows")
        with torch.no_grad():
            network.norm.weight.copy_(target.decoder.norm.weight)
            network.mask_embedding.copy_(target.tokens.weight.float().mean(0))
        return network

    def load(self, folder: Path) -> Block:
        """Returns the network of a folder."""
        return load_block(folder, self.target)

    def save(self, folder: Path) -> None:
        """Writes the network to a folder."""
        save_block(self.model, folder)

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the loss of a batch, as the weighted mean over slots."""
        rows = self.train[batch]
        count = min(self.recipe.anchors, self.last_anchor)
        draws = torch.rand(len(rows), self.last_anchor, device=self.device)
        anchors = 1 + draws.topk(count).indices
        said, logits = self._predict(rows, anchors)
        wanted = logits.softmax(-1)
        slots = torch.arange(wanted.shape[2], device=self.device)
        weights = torch.exp(-slots / self.recipe.gamma)
        weights = weights / weights.sum()

        def mean(values: Tensor) -> Tensor:
            return (values.mean((0, 1)) * weights).sum()

        unary = mean(-(wanted * said.unary.log_softmax(-1)).sum(-1))
        parts = {"logits": unary.detach()}
        total = unary
        if said.columns is not None:
            # Of the target's probability only what the candidates hold can be learnt.
            held = wanted.gather(-1, said.columns)
            pairs = mean(-(held * said.scores.log_softmax(-1)).sum(-1))
            total, parts["selector"] = total + pairs, pairs.detach()
        elif self.model.config.markov is not None:
            own = said.scores.log_softmax(-1)
            likelihood = mean(-(wanted * own).sum(-1))
            variation = mean(0.5 * (own.exp() - wanted).abs().sum(-1))
            total = LIKELIHOOD_WEIGHT * likelihood + (1 - LIKELIHOOD_WEIGHT) * variation
            parts = {"logits": likelihood.detach(), "variation": variation.detach()}
        return StepLoss(total, parts, rows.shape[0] * count * wanted.shape[2])

    @torch.inference_mode()
    def validate(self) -> dict[str, float]:
        """Returns the mean accept length of a chain, and the accuracy of each slot.

        A slot reads the text's own token before it, so this is the accept length on text that the
        target wrote without draws.
        """
        step = max(self.last_anchor // self.recipe.anchors, 1)
        places = torch.arange(1, self.last_anchor + 1, step, device=self.device)
        found = []
        for part in self.validation_batches():
            said, logits = self._predict(part, places.expand(len(part), -1))
            found.append((said.best() == logits.argmax(-1)).flatten(0, 1))
        return accept_metrics(torch.cat(found).T, "slot")

    def _predict(self, rows: NDArray[np.int64], anchors: Tensor) -> tuple[_Said, Tensor]:
        """Returns what the network says after anchors [b, n], and the target's logits."""
        tokens, states, logits = self._target(rows)
        batch = torch.arange(len(tokens), device=self.device)[:, None, None]
        slots = torch.arange(self.model.config.num_slots, device=self.device)
        places = anchors[..., None] + slots
        outputs = self.outputs(tokens, states, anchors)
        unary = self.model.logits(outputs, self.target)
        said = self._score(outputs, unary, tokens[batch, places])
        return said, logits[batch, places].float()

    def _score(self, outputs: Tensor, unary: Tensor, before: Tensor) -> _Said:
        """Scores tokens given the tokens before them [b, n, K]."""
        network = self.model
        if network.config.selector is not None:
            best = unary.topk(min(network.config.selector.num_candidates, unary.shape[-1]))
            contexts = network.selector.contexts(outputs, before[..., None])
            columns = best.indices
            pairs = pair_scores(best.values, contexts, network.selector.successors, columns)
            return _Said(unary, pairs[..., 0, :], columns)
        if network.config.markov is None:
            return _Said(unary, unary, None)
        head, scores = network.markov, []
        state = head.start(outputs[:, :, 0])
        for slot in range(outputs.shape[2]):
            hidden, token = outputs[:, :, slot], before[:, :, slot]
            context = head.contexts(hidden, token[..., None], state)[..., 0, :]
            scores.append(unary[:, :, slot] + F.linear(context, head.successors).float())
            state = head.advance(hidden, token, state)
        return _Said(unary, torch.stack(scores, dim=2), None)

    def outputs(self, tokens: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """Returns the outputs [b, n, K, E] of blocks in one packed pass.

        Args:
            tokens: [b, T] tokens.
            states: [b, T, F] states of the target.
            anchors: [b, n] positions of the anchors.
        """
        config, (rows, count) = self.model.config, anchors.shape
        size, length = config.block_size, tokens.shape[1]
        steps = torch.arange(length, device=self.device)
        positions = (anchors[..., None] + torch.arange(size, device=self.device)).flatten(1)
        # A row of a block sees the context before its anchor, and its block.
        starts = anchors.repeat_interleave(size, dim=1)
        context = steps < starts[..., None]
        inside = torch.arange(count * size, device=self.device)
        block = (inside[:, None] // size == inside // size).expand(rows, -1, -1)
        masks = {}
        for causal in set(config.causal):
            own = block & (inside <= inside[:, None]) if causal else block
            masks[causal] = torch.cat([context, own], dim=-1)[:, None]
        entries = self.model.entries(states, steps.expand(rows, -1))
        attends = [
            BlockAttention(key, value, masks[causal])
            for (key, value), causal in zip(entries, config.causal, strict=True)
        ]
        embedded = self.model.embed(tokens.gather(1, anchors), self.target).flatten(1, 2)
        out: Tensor = self.model(embedded.float(), positions, attends)
        return out.view(rows, count, config.num_slots, -1)

    @torch.no_grad()
    def _target(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens [b, T], states [b, T, F] and logits [b, T, V]."""
        tokens = torch.from_numpy(rows).to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)
        aux_states = AuxHiddenStates(self.model.config.target_layers)
        final = self.target(tokens, positions, DenseAttention(), None, aux_states)
        return tokens, torch.cat(aux_states.states, dim=-1).float(), self.target.logits(final)
