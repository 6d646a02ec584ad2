"""A reference generation loop: full float64 forward passes, no cache, no engine."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from recserve.kernels.acceptance.acceptance import DraftProbs
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.tree import AUXILIARY, TokenTree, from_parents
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.speculation.draft import Budget, TextDraft
from recserve.speculation.drafter import Drafter, StateSpan, TextContext, TextOutcome
from recserve.speculation.logits_processor import LogitsProcessor, TextColumns
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.sampling_table import sampling_table
from recserve.speculation.verifier import ScoredTrees
from recserve.speculation.verifiers.registry import verifiers, verify

VOCABULARY = 29


def tiny_model(seed: int = 0, vocabulary: int = VOCABULARY, sharp: float = 6.0) -> LanguageModel:
    """Returns a random model, sharp enough that its greedy text does not repeat one token."""
    torch.manual_seed(seed)
    decoder = DecoderConfig(16, 2, 4, 2, 8, 24, max_positions=512)
    model = LanguageModel(LanguageModelConfig(decoder, vocabulary, tied=False)).double().eval()
    assert model.head is not None
    model.head.weight.data.mul_(sharp)
    return model.requires_grad_(False)


@dataclass
class Written:
    """Text of one loop; `lengths` holds the accept length of each step."""

    tokens: list[int]
    lengths: list[int] = field(default_factory=list)
    drafts: list[TextDraft] = field(default_factory=list)

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / max(len(self.lengths), 1)


def check_draft(draft: TextDraft, budget: Budget, vocabulary: int) -> None:
    """Asserts what holds for every draft."""
    n = len(draft)
    assert n <= budget.num_nodes and draft.depth <= budget.depth
    assert draft.tokens.dtype == draft.parents.dtype == torch.int64
    tree = from_parents(draft.tokens, draft.parents)  # raises unless preorder
    assert draft.depth == (int(tree.depths.max()) + 1 if n else 0)
    assert not n or 0 <= int(draft.tokens.min()) <= int(draft.tokens.max()) < vocabulary
    if draft.probs is None:
        seen = set()
        kinds = [0] * n if draft.kinds is None else draft.kinds.tolist()
        for token, parent, kind in zip(
            draft.tokens.tolist(), draft.parents.tolist(), kinds, strict=True
        ):
            if kind != AUXILIARY:
                assert (parent, token) not in seen, "equal siblings"
                seen.add((parent, token))


def with_node_0(token: int, draft: TextDraft) -> TokenTree:
    """Returns the tree of the step, with the last token as its root."""
    tokens = torch.cat([torch.tensor([token]), draft.tokens])
    tree = from_parents(tokens, torch.cat([torch.tensor([-1]), draft.parents + 1]))
    kinds = None
    if draft.kinds is not None:
        kinds = torch.cat([draft.kinds.new_zeros(1), draft.kinds])
    return TokenTree(tree.tokens, tree.parents, tree.depths, tree.ends, tree.offsets, kinds)


def score(model: LanguageModel, root: Seq[int], tree: TokenTree) -> torch.Tensor:
    """Returns the hidden states of the tree's nodes below a prefix, from one dense pass."""
    n, m = len(root), tree.num_nodes
    tokens = torch.cat([torch.tensor(root, dtype=torch.int64), tree.tokens])
    positions = torch.cat([torch.arange(n), n + tree.depths])
    mask = torch.ones(n + m, n + m, dtype=torch.bool).tril()
    mask[n:, n:] = tree.dense_mask()
    return model(tokens[None], positions[None], DenseAttention(mask))[0, n:]


class Memory:
    """Slots of some texts for a drafter that reads tokens, in place of an engine's."""

    def __init__(self, drafter: Drafter, contexts: Seq[TextContext], width: int = 600) -> None:
        self._drafter, self._read = drafter, dict[int, int]()
        size = (len(contexts) + 1) * width
        table = torch.arange(size).view(-1, width)
        for row, context in enumerate(contexts, 1):
            context.table, context.row = table, row
        for part in drafter.parts:
            if part.kv_shape is not None:
                part.attach(
                    KVPool(part.kv_shape, size, 1, torch.float64, "cpu", part.scratch_slots)
                )

    def read(self, contexts: Seq[TextContext]) -> None:
        """Passes on the tokens that the drafter has not received."""
        spans = []
        for context in contexts:
            first, stop = self._read.get(context.id, 0), len(context.tokens) - 1
            if first < stop:
                spans.append(StateSpan(context, first, torch.empty(stop - first, 0)))
                self._read[context.id] = stop
        if spans and self._drafter.reads_states:
            self._drafter.read(spans)


def propose(drafter: Drafter, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
    """Returns the first drafts of texts."""
    Memory(drafter, contexts).read(contexts)
    return drafter.propose(contexts, budgets)


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    drafter: Drafter,
    rule: str = "sample",
    num_nodes: int = 32,
    speculation: Speculation | None = None,
) -> list[Written]:
    """Continues the prompts concurrently until each has max_tokens."""
    speculation = speculation or Speculation("test", rule)
    contexts = [TextContext(i, list(p), len(p), params, speculation) for i, p in enumerate(prompts)]
    written = [Written([]) for _ in prompts]
    running, memory = list(contexts), Memory(drafter, contexts)
    while running:
        memory.read(running)
        budgets = [Budget(num_nodes, params.max_tokens - c.num_output - 1) for c in running]
        drafts = drafter.propose(running, budgets)
        outcomes = []
        for context, budget, draft in zip(running, budgets, drafts, strict=True):
            check_draft(draft, budget, model.config.vocab_size)
            if not params.greedy:
                verifiers()[speculation.verifier].check(draft)
            outcomes.append(step(model, context, draft, speculation.verifier))
            written[context.id].lengths.append(len(outcomes[-1].accepted))
            written[context.id].drafts.append(draft)
        running = [c for c in running if c.num_output < params.max_tokens]
        drafter.commit([o for o in outcomes if o.context in running])
        for context in (o.context for o in outcomes if o.context not in running):
            drafter.forget(context.id)
    for context in contexts:
        written[context.id].tokens = context.tokens[context.num_prompt :]
    return written


def step(model: LanguageModel, context: TextContext, draft: TextDraft, rule: str) -> TextOutcome:
    """Scores and verifies one draft."""
    tree = with_node_0(context.tokens[-1], draft)
    hidden = score(model, context.tokens[:-1], tree)
    logits = model.logits(hidden)
    table = sampling_table([context.params])
    probs = None
    if draft.probs is not None:
        probs = DraftProbs(draft.probs.double(), torch.arange(-1, len(draft)))
    accepted = verify(
        rule,
        ScoredTrees(
            tree,
            draft.depth,
            LogitsProcessor(
                logits, tree, draft.depth, table, TextColumns.of([context], table).past(table, None)
            ),
            table.seeds,
            torch.tensor([len(context.tokens)]),
            logits.shape[1],
            probs,
            table.greedy,
        ),
    )
    path = accepted.nodes[0, : int(accepted.lengths) + 1]
    tokens = [*tree.tokens[path[1:]].tolist(), int(accepted.bonus)]
    context.tokens += tokens
    context.hidden = hidden[path[-1]]
    kept = tuple((path[1:] - 1).tolist())
    return TextOutcome(context, draft, kept, hidden, logits)
