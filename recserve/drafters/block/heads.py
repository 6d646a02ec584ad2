"""Parts of block drafters besides their decoder layers: convolution, selector and Markov head.

The selector and the Markov head score a pair of tokens in neighbouring slots. Both have the form

    score(predecessor p, token c at slot k) = logit_k[c] + <context(p, h_k), successor[c]>

with `h_k`, the network's output at the slot.

Sources: DFlash2 (z-lab/dflash, dflash/model.py) for convolution and selector; DSpark (arXiv
2607.05147, deepseek-ai/DeepSpec) for the Markov head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class ConvConfig:
    """Grouped dynamic convolution around attention and MLP (DFlash2).

    Attributes:
        taps: Rows that a row reads: itself and those before it in its block.
        group_size: Channels that share a dynamic coefficient.
    """

    taps: int = 2
    group_size: int = 16


@dataclass(frozen=True)
class SelectorConfig:
    """Candidate selector (DFlash2).

    Attributes:
        rank: r, size of a token's vector.
        num_candidates: Candidates of each slot, the likeliest tokens of the network.
    """

    rank: int = 256
    num_candidates: int = 16


@dataclass(frozen=True)
class MarkovConfig:
    """Markov head (DSpark).

    Attributes:
        rank: r, size of a token's vector.
        kind: How the predecessor's vector becomes a context. `vanilla` uses it as it is, `gated`
            multiplies it by a gate, `rnn` carries a state along the path.
    """

    rank: int = 256
    kind: MarkovKind = "vanilla"


class GroupedConv(nn.Module):
    """Causal convolution within blocks, with coefficients from its input, on both sides of a layer.

    The first row of a block reads nothing before it.
    """

    def __init__(self, config: ConvConfig, hidden_size: int, block_size: int) -> None:
        super().__init__()
        self.taps, self.block_size = config.taps, block_size
        self.num_groups = hidden_size // config.group_size
        base = torch.zeros(2, config.taps, hidden_size)
        base[:, 0] = 1.0
        # An identity at the start of training, as in the published trainer.
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(
            hidden_size, 2 * config.taps * self.num_groups, bias=False
        )
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolves a sublayer's input.

        Args:
            x: [..., n S, E] normalised input of n blocks.

        Returns:
            The convolved input, and the coefficients [..., n S, taps, G] for `after`.
        """
        kernels = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.num_groups))
        return self._convolve(x, kernels[..., 0, :, :], 0), kernels[..., 1, :, :]

    def after(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Convolves a sublayer's output [..., n S, E] with the coefficients of its input."""
        return self._convolve(x, coefficients, 1)

    def _convolve(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        rows, groups = (-1, self.block_size), self.num_groups
        blocks = x.reshape(*x.shape[:-2], *rows, groups, x.shape[-1] // groups)
        base = self.base_kernel[side].view(self.taps, groups, -1)
        delta = delta.reshape(*x.shape[:-2], *rows, self.taps, groups, 1)
        out: Tensor = (base[0] + delta[..., 0, :, :]) * blocks
        for tap in range(1, self.taps):
            earlier = F.pad(blocks[..., :-tap, :, :], (0, 0, 0, 0, tap, 0))
            out = out + (base[tap] + delta[..., tap, :, :]) * earlier
        return out.flatten(-4, -3).flatten(-2)


class CandidateSelector(nn.Module):
    """DFlash2's selector: a bilinear score of predecessor, output and successor."""

    def __init__(self, config: SelectorConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        shape = vocab_size, config.rank
        self.predecessor_codebook = nn.Parameter(torch.randn(shape) * config.rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.randn(shape) * config.rank**-0.5)
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)
        # Scores start as the network's own logits.
        nn.init.zeros_(self.hidden_projection.weight)

    @property
    def successors(self) -> Tensor:
        """[V, r] vector of each token as a successor."""
        return self.successor_codebook

    def contexts(self, hidden: Tensor, predecessors: Tensor) -> Tensor:
        """Returns contexts [..., P, r] of outputs [..., E] and predecessors [..., P]."""
        projected = self.hidden_projection(hidden)[..., None, :]
        contexts: Tensor = self.predecessor_codebook[predecessors] * projected
        return contexts


class MarkovHead(nn.Module):
    """DSpark's head: a bias on the logits from the token before."""

    def __init__(
        self, config: MarkovConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int
    ) -> None:
        super().__init__()
        self.config = config
        rank = config.rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        # No nn.Linear: packing would hide the weight, whose rows are read.
        self.markov_w2 = nn.Parameter(torch.zeros(draft_vocab_size, rank))
        if config.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if config.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    @property
    def successors(self) -> Tensor:
        """[draft_vocab_size, r] vector of each token as a successor."""
        return self.markov_w2

    def start(self, hidden: Tensor) -> Tensor:
        """Returns the state [..., r] before the first slot, for outputs [..., E]."""
        return hidden.new_zeros(*hidden.shape[:-1], self.config.rank)

    def contexts(self, hidden: Tensor, predecessors: Tensor, state: Tensor) -> Tensor:
        """Returns contexts of one slot.

        Args:
            hidden: [..., E] outputs at the slot.
            predecessors: [..., P] tokens before the slot.
            state: [..., r] state of the path before these tokens; only `rnn` reads it.

        Returns:
            [..., P, r].
        """
        vectors: Tensor = self.markov_w1(predecessors)
        if self.config.kind == "vanilla":
            return vectors
        wide = hidden[..., None, :].expand(*vectors.shape[:-1], -1)
        if self.config.kind == "gated":
            gate = self.gate_proj(torch.cat([wide, vectors], dim=-1))
            return torch.sigmoid(gate) * vectors
        return torch.tanh(self._joint(wide, vectors, state)[2])

    def advance(self, hidden: Tensor, predecessor: Tensor, state: Tensor) -> Tensor:
        """Returns the state [..., r] after a slot with the predecessor [...]."""
        if self.config.kind != "rnn":
            return state
        vectors = self.markov_w1(predecessor)[..., None, :]
        gate, candidate, _ = self._joint(hidden[..., None, :], vectors, state)
        gate, candidate = torch.sigmoid(gate)[..., 0, :], torch.tanh(candidate)[..., 0, :]
        return gate * state + (1 - gate) * candidate

    def _joint(self, hidden: Tensor, vectors: Tensor, state: Tensor) -> list[Tensor]:
        """Returns gate, candidate and output [..., P, r] before their nonlinearities."""
        wide = state[..., None, :].expand_as(vectors)
        return list(self.joint_proj(torch.cat([wide, vectors, hidden], dim=-1)).chunk(3, dim=-1))


def pair_scores(unary: Tensor, contexts: Tensor, successors: Tensor, columns: Tensor) -> Tensor:
    """Returns scores [..., P, C] of candidates given their predecessors.

    Args:
        unary: [..., C] logits of the candidates.
        contexts: [..., P, r].
        successors: [V, r].
        columns: [..., C] candidates, as columns of the logits.
    """
    return unary[..., None, :] + (contexts @ successors[columns].mT).float()
