"""The drafter interface: its view of a running sequence, and the outcome of a step.

The committed tokens of a sequence are its prompt and its output. All of them have cached keys and
values, except the last one. The last one is node 0 of every step's tree, and the draft hangs below:

    committed ... a b c      tree:  c -+- d --- e
                                       `- f          draft: tokens [d, e, f], parents [-1, 0, -1]

One forward pass scores all nodes. The logits at a node of depth d predict absolute position
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
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.host import on_device
from recserve.kernels.tree_batch import Prefixes
from recserve.models.adapters import DecoderAdapter
from recserve.models.language_model import LanguageModel
from recserve.speculation.draft import Budget, TextDraft
from recserve.speculation.open_question import CheckpointAmbiguity
from recserve.speculation.sampling_params import SamplingParams, Speculation


@dataclass(eq=False)
class TextContext:
    """A drafter's view of a running sequence. The engine updates it; drafters only read it.

    Attributes:
        id: Number that is unique in the engine's life.
        tokens: Committed tokens, the prompt first.
        num_prompt: Number of prompt tokens.
        params: Sampling parameters of the request.
        speculation: Drafting options of the request.
        hidden: [E] final hidden state of the target at `tokens[-2]`, whose logits gave
            `tokens[-1]`. None if it is unknown: the prompt has one token, or its computation shares
            the forward pass with the draft. The next step may overwrite its memory.
        table: [R, W] slot table of the target's cache. None outside of an engine.
        row: The sequence's row of the table, with the slots of its positions. The row has a slot
            for each token when a drafter is called.
        ranked: [K, W] int64 on the host: tokens that the drafter's heads ranked from `hidden` in
            the step that computed it (see RankedHeads). None if they did not.
        salt: As in `core.client.Client`. What a drafter learns from a sequence serves sequences
            with the same salt only.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    speculation: Speculation
    hidden: Tensor | None = None
    ranked: NDArray[np.int64] | None = None
    table: Tensor | None = None
    row: int = 0
    salt: bytes = b""

    @property
    def num_output(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def slots(self) -> Tensor:
        """[W] pool slots of the sequence's positions."""
        assert self.table is not None
        return self.table[self.row]


def entries_before(contexts: Seq[TextContext], stops: Seq[int]) -> Prefixes:
    """Returns where the entries of rows 0 to `stop` of each sequence lie.

    The entry of a committed token's row lies in the slot of the next token.
    """
    table = contexts[0].table
    assert table is not None
    starts = [context.row * table.shape[1] + 1 for context in contexts]
    return Prefixes(table, starts, stops)


@dataclass(frozen=True)
class TextOutcome:
    """Result of a step for one sequence, as its drafter receives it.

    Attributes:
        context: The sequence after the commit.
        draft: The scored draft: the proposal, or an empty draft if the step had no room for it.
        accepted: Indices of the accepted draft nodes, in order.
        all_hidden: [T, E] hidden states of the whole step. The next step may overwrite this memory.
        all_logits: [T, V] raw logits of the whole step. The next step may overwrite this memory.
        first: Row of node 0 in `all_hidden` and `all_logits`.
        rows: Row of node 0 and of each node of the draft. None: they follow `first`. A node that
            was not scored, because a constraint forbids it, has the row of node 0.
    """

    context: TextContext
    draft: TextDraft
    accepted: tuple[int, ...]
    all_hidden: Tensor
    all_logits: Tensor
    first: int = 0
    rows: tuple[int, ...] | None = None

    @property
    def hidden(self) -> Tensor:
        """[1 + n, E] hidden states of the target at node 0 and at every draft node."""
        if self.rows is not None:
            return self.all_hidden[on_device(self.rows, self.all_hidden.device)]
        return self.all_hidden[self.first : self.first + 1 + len(self.draft)]

    @property
    def logits(self) -> Tensor:
        """[1 + n, V] raw logits of the target at node 0 and at every draft node."""
        if self.rows is not None:
            return self.all_logits[on_device(self.rows, self.all_logits.device)]
        return self.all_logits[self.first : self.first + 1 + len(self.draft)]


@dataclass(frozen=True)
class StateSpan:
    """States of the target at consecutive positions of a sequence.

    Attributes:
        context: The sequence. The token after the last position is committed too.
        first: First position.
        states: [m, F] states of the layers `Drafter.hidden_layers`, side by side. The drafter may
            keep this tensor.
    """

    context: TextContext
    first: int
    states: Tensor


@dataclass(frozen=True)
class DraftForm:
    """What a captured draft computes, regardless of the number of texts.

    Attributes:
        name: What it makes. Of two forms with the same name, the deeper one also makes what the
            other makes.
        depth: Most levels below node 0. 0: it only reads states.
        forks: Whether drafts may fork.
    """

    name: str
    depth: int
    forks: bool = False


READ = DraftForm("read", 0)


@dataclass(frozen=True)
class DraftPlan:
    """What a captured draft gives one text, known before it runs.

    Attributes:
        form: A form with the name of those that make it, of any depth.
        num_nodes: Number of nodes.
        depth: Most levels.
    """

    form: DraftForm
    num_nodes: int
    depth: int


@dataclass(frozen=True)
class DraftInputs:
    """What a captured draft reads of B texts, on the device.

    The last texts may be fillers. They have row 0 of the slot table, one committed token, no new
    states and no nodes.

    Attributes:
        table: [R, W] slot table of the target's cache.
        rows: [B] row of each text in the table.
        lengths: [B] committed tokens.
        temperatures: [B] float32; 0 means no noise.
        top_k: [B] as in `SamplingTable`, like the next two.
        top_p: [B] float32.
        min_p: [B] float32.
        seeds: [B] seeds of the requests.
        depths: [B] most levels of each draft.
        num_nodes: [B] nodes of each draft, as planned.
        new_counts: [B] number of states that the drafter has not received. The last of them belongs
            to the last committed token but one.
        new_known: [B] bool, whether the drafter received the state before them.
        new_tokens: [B, S] the token after each of these states, in order.
        new_states: [B, S, F] these states, then zeros.
        greedy: Whether no text draws.
        most_nodes: N, nodes of the largest draft.
    """

    table: Tensor
    rows: Tensor
    lengths: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    depths: Tensor
    num_nodes: Tensor
    new_counts: Tensor
    new_known: Tensor
    new_tokens: Tensor
    new_states: Tensor
    greedy: bool
    most_nodes: int


class CapturableDrafter(Protocol):
    """A drafter that reads new states and drafts in one function of fixed shapes.

    A captured draft runs this function for a fixed number of texts. The function only launches
    kernels: it waits for nothing, and no shape depends on values. `read` and `propose` give the
    same drafts. They remain for what no captured draft holds, such as prompts.
    """

    @property
    def forms(self) -> Seq[DraftForm]:
        """Forms worth capturing, besides READ: several depths of a name if fewer levels cost
        less.
        """
        ...

    @property
    def most_new_states(self) -> int:
        """S, the most states of a text that a captured draft reads.

        A form with fewer levels than the deepest of its name reads as many states fewer.
        """
        ...

    @property
    def most_texts(self) -> int:
        """Most texts of a captured draft."""
        ...

    def min_bytes(self, form: DraftForm, greedy: bool) -> int:
        """Returns the memory of the logits that `draft` holds at once for each text.

        Args:
            form: Any of `forms`.
            greedy: As in `DraftInputs`.
        """
        ...

    def plan(self, context: TextContext, budget: Budget) -> DraftPlan | None:
        """Returns the plan of a text whose states are all received.

        The form is READ if the text gets no draft. None if only `propose` can make its draft.
        """
        ...

    def is_ready(self, context: TextContext) -> bool:
        """Whether the drafter has received the states of all committed tokens but the last."""
        ...

    def note_new(self, context: TextContext, first: int) -> bool:
        """Notes that the next call of `draft` receives the states from `first` to the last one.

        Returns:
            Whether the drafter received the state before `first`.
        """
        ...

    def draft(self, inputs: DraftInputs, form: DraftForm) -> tuple[Tensor, Tensor] | None:
        """Reads the new states, then drafts.

        Returns:
            Tokens and parents [B, N] of the drafts as in `TextDraft`. Values after the planned
            number of nodes have no meaning. None for READ.
        """
        ...


class RankedHeads(Protocol):
    """K heads, each of which ranks the tokens of one position from the target's last hidden state.

    A captured step can end with these heads, because their only input is the state that the step
    computes. Such a step also ranks the next draft's tokens, and the drafter only builds its tree.
    """

    @property
    def num_heads(self) -> int:
        """K, the number of heads."""
        ...

    @property
    def num_ranks(self) -> int:
        """W, the number of best tokens that the drafter needs from each head."""
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
    first `propose` with an id starts this state from `context.tokens`. This call precedes the
    computation of the prompt, so no hidden state is known then.

    Under an exact verifier a drafter cannot change the text. A draft may be arbitrarily wrong, but
    it must stay within its budget. Its quality shows in the time of a request, so a drafter that
    learns from one sequence for others keeps what it learns apart by `context.salt`.

    A drafter that draws tokens sets `draws` and keys its noise with
    `noise.gumbel(seeds, noise.step_keys(lengths, ...), V, DRAFT)`. Under the rule `sample`
    the target's own noise, `gumbel(seeds, positions, V)`, is better. A draw with it from a similar
    distribution predicts the token that the target is about to draw.

    A drafter that reads the target's states sets `reads_states`. The engine then passes it the
    states at every committed position but the last, in order, through `read`, before it calls
    `propose`. Such a drafter may have keys and values of its own. The entry of position p is made
    from the state at p - 1 and the token at p, and is stored in the slot of p. The engine copies,
    shares and evicts these entries together with the target's. So the drafter keeps no prefix of
    its own, and a cached prefix is cached for the drafter too. A drafter that only needs the tokens
    reads the states of no layer, and receives those of a prompt before they are computed.

    To add a drafter, derive from this class in one file, and name the class in
    `drafters/registry.py` or in the entry-point group `recserve.drafters` of a distribution.

    Attributes:
        name: Name in requests and settings.
        needs_weights: True if `from_folders` needs folders. Every server offers the other drafters.
        num_folders: Number of folders that it takes, in order, when several joined drafters share a
            list of folders; None means all that remain.
        hidden_layers: Target layers whose states it reads: n is the residual stream after the first
            n layers, FINAL_LAYER the final state.
        reads_states: True if `read` receives these states. Otherwise only `TextContext.hidden`
            holds the final one.
        kv_shape: Shape of its own keys and values; None if it has none.
        scratch_slots: Slots of scratch memory that it needs besides those of the pages.
        idle: True if it never proposes anything, so that the engine need not call it.
        parts: The drafters that it consists of, which have keys and values of their own: itself, or
            those that it joins.
        takes_tree: True if it follows `Speculation.tree`; then it overrides `check_tree`.
        draws: True if its drafts may carry probs.
        always_draws: True if all of its drafts carry probs under a rule that reads them. Other
            drafters are refused under a rule that needs them.
        ranked_heads: Heads that a captured step can end with, or None. Their output arrives in
            `TextContext.ranked`.
        capturable: Its function of fixed shapes, or None if it is always launched.
    """

    needs_weights: ClassVar[bool] = False
    num_folders: ClassVar[int | None] = None
    hidden_layers: tuple[int, ...] = ()
    reads_states: bool = False
    kv_shape: KVShape | None = None
    scratch_slots: int = 0
    idle: ClassVar[bool] = False
    takes_tree: bool = False
    draws: bool = False

    @property
    def always_draws(self) -> bool:
        """True if all of its drafts carry probs under a rule that reads them."""
        return self.draws

    @property
    def parts(self) -> Seq[Drafter]:
        """The drafters that it consists of."""
        return (self,)

    @property
    def ranked_heads(self) -> RankedHeads | None:
        """Heads that a captured step can end with; None if there are none."""
        return None

    @property
    def capturable(self) -> CapturableDrafter | None:
        """Its function of fixed shapes; None if it is always launched."""
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

    @classmethod
    def open_questions(cls, folder: Path, target: LanguageModel) -> tuple[CheckpointAmbiguity, ...]:
        """Returns what the files of a folder leave open; `recserve doctor` tries all readings.

        Args:
            folder: Folder of the drafter's weights, which `from_folders` reads without an error.
            target: The model that verifies.
        """
        return ()

    def adapt_target(self, adapter: DecoderAdapter) -> DecoderAdapter:
        """Returns the target as the engine runs it for this drafter: mostly the given one.

        A drafter whose auxiliary nodes have inputs of its own returns an adapter that computes
        them. It gives these nodes kinds above AUXILIARY, and reads their states in
        `TextOutcome.hidden`. When an engine is built, each drafter gets the result of the one
        before it.

        Raises:
            ValueError: If the drafter cannot share an engine with those before it.
        """
        return adapter

    def attach(self, pool: KVPool) -> None:  # noqa: B027
        """Receives the pool of its own keys and values, with the slots of the target's pool.

        The slots from `pool.first_scratch_slot` on are scratch memory of the drafter.
        """

    def read(self, parts: Seq[StateSpan]) -> None:  # noqa: B027
        """Receives states that it has not received yet, of several sequences."""

    @abstractmethod
    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns one draft per context, in order, each within its budget. Called once per step."""

    def commit(self, outcomes: Seq[TextOutcome]) -> None:  # noqa: B027
        """Receives the outcomes of the last drafts, only for sequences that continue."""

    def forget(self, context_id: int) -> None:  # noqa: B027
        """Drops the state of a sequence that ended or was preempted.

        A preempted sequence that resumes starts again from its tokens.
        """

    def check_tree(self, speculation: Speculation) -> None:  # noqa: B027
        """Raises ValueError if the drafter cannot fill the request's tree."""
