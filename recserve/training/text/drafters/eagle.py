"""Training of EAGLE networks, which draft for a frozen target model.

EAGLE-1's network learns the target's next state (smooth L1) and its next distribution
(cross-entropy, weight 0.1), with noise on the states that it reads. EAGLE-3's network learns only
distributions, but over several unrolled steps: in step i it reads its own outputs of step i - 1, as
it does in a draft (training-time test). Step i has the weight 0.8 ** i. MTP modules share this loss
(training/text/drafters/mtp.py).

Sources: EAGLE-1 (arXiv 2401.15077, section 3.2), EAGLE-3 (arXiv 2503.01840, section 3.1), and the
settings of their published trainers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from recserve.drafters.eagle.files import load_eagle, save_eagle
from recserve.drafters.eagle.network import Eagle, EagleConfig
from recserve.drafters.mtp.network import Mtp
from recserve.models.attention import Attend, DenseAttention
from recserve.models.decoder import FINAL_LAYER, AuxHiddenStates, RMSNorm
from recserve.models.language_model import LanguageModel
from recserve.training.loop import StepLoss
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.trainee import DrafterTrainee, accept_metrics

LOGITS_WEIGHT = 0.1
NOISE = 0.2  # uniform noise of +-0.1, divided by the number of positions per 512


@dataclass(frozen=True)
class EagleRecipe:
    """Sizes of an EAGLE network and settings of its training.

    Attributes:
        kind: `eagle` is the network of EAGLE-1 and 2, `eagle3` that of EAGLE-3, `mtp` an MTP
            module.
        steps: Unrolled steps of EAGLE-3 and MTP, and levels of the measured chain.
        draft_vocab_size: Tokens that EAGLE-3 may propose, the most frequent of the training text.
            None means all.
        window: Tokens of a training row.
        batch: Rows per step.
        validation_rows: Most validation rows that are measured.
        schedule: Learning rate, averaging and stopping.
    """

    kind: Literal["eagle", "eagle3", "mtp"] = "eagle3"
    steps: int = 6
    draft_vocab_size: int | None = None
    window: int = 256
    batch: int = 8
    validation_rows: int = 64
    schedule: Schedule = field(
        default_factory=lambda: Schedule(4, 1e-3, weight_decay=0.0, max_norm=0.5, betas=(0.9, 0.95))
    )


class UnrolledAttention(Attend):
    """Attention of the unrolled steps of a network with one layer.

    Row t of step i sees the rows 0..t of step 0, and row t of each step since.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends with query [B, T, H, D], key and value [B, T, K, D]; returns [B, T, H, D]."""
        assert layer == 0
        rows, group = query.shape[1], query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
        self._steps.append((key, value))
        scale = query.shape[-1] ** -0.5
        first_key, first_value = (x[:, :rows] for x in self._steps[0])
        scores = torch.einsum("bnhd,bmhd->bhnm", query, first_key) * scale
        causal = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
        columns = [scores.masked_fill(~causal, float("-inf"))]
        later = [(k[:, :rows], v[:, :rows]) for k, v in self._steps[1:]]
        columns += [(query * k).sum(-1).transpose(1, 2)[..., None] * scale for k, _ in later]
        weights = torch.cat(columns, dim=-1).softmax(-1)
        mixed = torch.einsum("bhnm,bmhd->bnhd", weights[..., :rows], first_value)
        for number, (_, own) in enumerate(later):
            mixed = mixed + weights[..., rows + number].transpose(1, 2)[..., None] * own
        return mixed


class EagleTrainee(DrafterTrainee[EagleRecipe, Eagle | Mtp]):
    """An EAGLE network on a frozen target, for the training loop.

    Attributes:
        discount: Weight of an unrolled step, as a share of the step before.
    """

    discount: ClassVar[float] = 0.8

    def new_network(self, train: NDArray[np.int64]) -> Eagle | Mtp:
        """Returns a new network; the training text decides which tokens it can propose."""
        network = Eagle(eagle_config(self.recipe, self.target))
        if network.token_map is not None:
            counts = np.bincount(train, minlength=self.target.config.vocab_size)
            most = np.argsort(-counts, kind="stable")[: network.config.draft_vocab_size]
            network.token_map.copy_(torch.from_numpy(np.sort(most)))
        if network.config.fused:
            self._start_from_head(network)
        return network.to(self.device)

    def load(self, folder: Path) -> Eagle | Mtp:
        """Returns the network of a folder."""
        return load_eagle(folder, self.target)

    def save(self, folder: Path) -> None:
        """Writes the network to a folder."""
        assert isinstance(self.model, Eagle)
        save_eagle(self.model, folder)

    @torch.no_grad()
    def _start_from_head(self, network: Eagle) -> None:
        """Copies the target's final norm and the rows of its head that the network has."""
        target, tokens = self.target, network.token_map
        head = target.tokens if target.head is None else target.head
        assert isinstance(head, nn.Linear | nn.Embedding) and isinstance(network.norm, RMSNorm)
        weight = head.weight.cpu()
        network.head.weight.copy_(weight if tokens is None else weight[tokens])
        network.norm.weight.copy_(target.decoder.norm.weight)

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the loss of a batch, as the mean over positions."""
        tokens, states, final, logits = self._target(self.train[batch])
        count = tokens.shape[0] * (tokens.shape[1] - 1)
        if self.recipe.kind == "eagle":
            size = states.shape[1]
            noise = (torch.rand_like(states) - 0.5) * (NOISE * 512 / size)
            (given,) = self._outputs(tokens, states + noise, 1)
            features = F.smooth_l1_loss(given.float(), final[:, 1:].float())
            wanted = logits[:, 1:].float().softmax(-1)
            said = self.model.logits(given, self.target).log_softmax(-1)
            likelihood = -(wanted * said).sum(-1).mean()
            total = features + LOGITS_WEIGHT * likelihood
            both = {"state": features.detach(), "logits": likelihood.detach()}
            return StepLoss(total, both, count)
        total = states.new_zeros((), dtype=torch.float32)
        parts: dict[str, Tensor] = {}
        for step, given in enumerate(self._outputs(tokens, states, self.recipe.steps)):
            wanted = logits[:, 1 + step :].float()
            known = torch.ones_like(wanted[..., 0], dtype=torch.bool)
            if self.model.token_map is not None:
                known = torch.isin(wanted.argmax(-1), self.model.token_map)
                wanted = wanted[..., self.model.token_map]
            said = self.model.logits(given, self.target).log_softmax(-1)
            own = -(wanted.softmax(-1) * said).sum(-1)
            part = (own * known).sum() / known.sum().clamp(min=1)
            parts[f"step_{step}"] = part.detach()
            total = total + self.discount**step * part
        return StepLoss(total, parts, count)

    @torch.inference_mode()
    def validate(self) -> dict[str, float]:
        """Returns the mean accept length of a chain of `steps` tokens, and each step's accuracy.

        A step reads the text's own token, so this is the accept length on text that the target
        wrote without draws.
        """
        found = []
        for part in self.validation_batches():
            tokens, states, _, logits = self._target(part)
            steps, right = self.recipe.steps, []
            for step, given in enumerate(self._outputs(tokens, states, steps)):
                said = self.model.targets(self.model.logits(given, self.target).argmax(-1))
                right.append(said == logits[:, 1 + step :].argmax(-1))
            size = right[-1].shape[1]
            found.append(torch.stack([own[:, :size].flatten() for own in right]))
        return accept_metrics(torch.cat(found, dim=1), "step")

    def _outputs(self, tokens: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Returns the outputs [B, T - 1 - i, E] of each step i.

        Args:
            tokens: [B, T] tokens.
            states: [B, T, F] states of the target.
            steps: Number of steps.
        """
        attend, outputs, last = UnrolledAttention(), list[Tensor](), tokens.shape[1] - 1
        embedded = self.target.tokens(tokens).float()
        for step in range(steps):
            rows = last - step
            positions = torch.arange(rows, device=tokens.device) + step
            words = embedded[:, 1 + step : 1 + step + rows]
            if step:
                given = self.model(outputs[-1][:, :rows], words, positions, attend)
            else:
                given = self.model.committed(states[:, :-1], words, positions, attend)
            outputs.append(given)
        return outputs

    @torch.no_grad()
    def _target(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns tokens [b, T], states [b, T, F], final states [b, T, E], logits [b, T, V]."""
        tokens = torch.from_numpy(rows).to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)
        layers = self.model.config.target_layers
        aux_states = AuxHiddenStates(tuple(n for n in layers if n != FINAL_LAYER))
        final = self.target(tokens, positions, DenseAttention(), None, aux_states)
        states = torch.cat(aux_states.states, dim=-1) if aux_states.states else final
        return tokens, states.float(), final.float(), self.target.logits(final)


def eagle_config(recipe: EagleRecipe, target: LanguageModel) -> EagleConfig:
    """Returns the configuration of a new network for a target."""
    decoder, words = target.config.decoder, target.config.vocab_size
    fused, depth = recipe.kind == "eagle3", target.config.decoder.num_layers
    # The published places are 2, half, and 3 before the end, which a shallow target has not.
    layers = (2, depth // 2, depth - 3) if depth > 8 else (1, depth // 2, depth - 1)
    return EagleConfig(
        decoder=replace(decoder, num_layers=1, dropout=0.0),
        target_size=decoder.hidden_size,
        target_layers=tuple(sorted(set(layers))) if fused else (FINAL_LAYER,),
        vocab_size=words,
        draft_vocab_size=min(recipe.draft_vocab_size or words, words) if fused else words,
        fused=fused,
        fc_bias=not fused,
    )
