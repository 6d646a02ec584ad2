"""What a drafter is, what it sees of a running sequence, and what it learns of a step.

The committed tokens of a sequence are prompt and output. Keys and values exist for all of them but
the last, which is node 0 of every step's tree; the draft hangs below it:

    committed ... a b c      tree:  c -+- d --- e
                                       `- f          draft: tokens [d, e, f], parents [-1, 0, -1]

One forward scores all nodes; the logits at a node of depth d predict absolute position
`committed length + d`. A verifier accepts a path from node 0 and draws one more token from the
target, the bonus token. So a step commits at least one token, whatever the draft was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.plugins import Pluggable
from recserve.models.language_model import LanguageModel
from recserve.speculation.draft import Budget, TextDraft
from recserve.speculation.sampling_params import SamplingParams, Speculation


@dataclass(eq=False)
class TextContext:
    """What a drafter sees of a running sequence. The engine keeps it; drafters only read.

    id: unique in the engine's life. tokens: committed, prompt first. hidden [E]: the target's final
    hidden state at `tokens[-2]`, the one whose logits gave `tokens[-1]`; None where it is not known
    (a prompt of one token, or one whose computation shares its forward with the draft). The next
    step may write where it lies. ranked
    [K, W] int64, on the host: tokens that the drafter's heads ranked from `hidden` in the step that
    found it (RankedHeads); None where they did not.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    speculation: Speculation
    hidden: Tensor | None = None
    ranked: NDArray[np.int64] | None = None

    @property
    def num_output(self) -> int:
        """Tokens written so far."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True)
class TextOutcome:
    """What a step did to one sequence, for its drafter.

    context: after the commit. draft: what was scored: the proposal, or an empty draft where there
    was no room for it. accepted: nodes of the draft that were kept, as indices into it, in order.
    tokens: what was committed, the bonus token last. all_hidden [T, E], all_logits [T, V]: of the
    whole step, whose row `first` is node 0; the next step may write where they lie.
    """

    context: TextContext
    draft: TextDraft
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    all_hidden: Tensor
    all_logits: Tensor
    first: int = 0

    @property
    def hidden(self) -> Tensor:
        """[1 + n, E] of the target at node 0 and at every draft node."""
        return self.all_hidden[self.first : self.first + 1 + len(self.draft)]

    @property
    def logits(self) -> Tensor:
        """[1 + n, V] of the target at node 0 and at every draft node, raw."""
        return self.all_logits[self.first : self.first + 1 + len(self.draft)]


class RankedHeads(Protocol):
    """K heads that each rank tokens of one position from the target's last hidden state.

    A captured step can end with them, because all they read is there when the step has ended. So
    the step that finds the state also ranks the next draft's tokens, and the drafter only builds
    its tree.
    """

    @property
    def num_heads(self) -> int:
        """K."""
        ...

    @property
    def num_ranks(self) -> int:
        """W, the number of best tokens that are needed of each head."""
        ...

    def ranked(
        self, hidden: Tensor, lengths: Tensor, temperatures: Tensor, seeds: Tensor, width: int
    ) -> Tensor:
        """Returns the best tokens of each head; row k is for position `lengths + k`.

        The call only launches kernels: it waits for nothing, and no shape depends on values.

        Args:
            hidden: [B, E] target states at the last computed token.
            lengths: [B] committed tokens.
            temperatures: [B] float32; 0 means no noise.
            seeds: [B] seeds of the requests.
            width: Tokens per head.

        Returns:
            [K, B, width] tokens, best first.
        """
        ...


class Drafter(Pluggable, ABC):
    """Proposes tokens for running sequences. One object serves all sequences that name it.

    Only `propose` is required. A drafter owns its state per sequence, keyed by `context.id`. The
    first `propose` with an id starts this state from `context.tokens`. It comes before the prompt
    is computed, so no hidden state is known then.

    Under an exact verifier nothing that a drafter does changes the text. A draft may be as wrong as
    it likes, but it must keep its budget.

    A drafter that draws tokens sets `draws` and keys its noise with
    `kernels.noise.gumbel(seeds, noise.step_keys(lengths, ...), V, DRAFT)`. Under the rule `sample`
    it does better with the target's own noise, `gumbel(seeds, positions, V)`: a draw from a similar
    distribution is then what the target is about to draw.

    To add a drafter, derive from this class in one file, and name the class in
    `drafters/registry.py` or in the entry-point group `recserve.drafters` of a distribution.

    Attributes:
        name: What requests and settings call it.
        needs_weights: True if `from_folders` needs folders. Every server offers the others.
        num_folders: Folders that it takes from those given for several joined drafters, in order;
            None means all that remain.
        hidden_layers: Target layers whose states it reads; -1 is the final state, the only one that
            `TextContext.hidden` holds today.
        idle: True if it never proposes anything, so that it need not be called.
        takes_tree: True if it follows `Speculation.tree`; then it overrides `check_tree`.
        draws: True if its drafts may carry probs.
        ranked_heads: Heads that a captured step can end with, or None. Their output arrives in
            `TextContext.ranked`.
    """

    needs_weights: ClassVar[bool] = False
    num_folders: ClassVar[int | None] = None
    hidden_layers: ClassVar[tuple[int, ...]] = ()
    idle: ClassVar[bool] = False
    takes_tree: bool = False
    draws: bool = False

    @property
    def ranked_heads(self) -> RankedHeads | None:
        """See the class."""
        return None

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> Drafter:
        """Builds the drafter for a target model.

        Args:
            folders: Folders of its weights; empty for a drafter without weights.
            target: The model that verifies.

        Raises:
            ValueError: If weights are missing or do not fit the target.
        """
        return cls()

    @abstractmethod
    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns one draft per context, in order, each within its budget. Called once a step."""

    def commit(self, outcomes: Seq[TextOutcome]) -> None:  # noqa: B027
        """Learns what became of the last drafts; called for sequences that go on only."""

    def forget(self, context_id: int) -> None:  # noqa: B027
        """The sequence ended or was preempted; if it resumes, it starts from its tokens."""

    def check_tree(self, speculation: Speculation) -> None:  # noqa: B027
        """Raises ValueError if the drafter cannot fill the request's tree."""
