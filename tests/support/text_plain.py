"""Reference plain decoding: one full forward pass per token, no cache, no tree, one row at a time.

The engine must equal it. The module also has drafters that try to cause a difference.
"""

import math

import numpy as np
import torch

from recserve.kernels.acceptance.noise import gumbel
from recserve.kernels.tree import AUXILIARY, CANDIDATE
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.speculation.draft import TextDraft, empty_draft
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_params import SamplingParams

VOCABULARY = 40
# config.json of `drawn_model`, with a larger bound of positions.
DRAWN_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float16",
}


def drawn_model(seed: int = 0, positions: int = 64, spread: float = 2.0) -> LanguageModel:
    """Returns a small model whose logits spread by about `spread`."""
    decoder = DecoderConfig(32, 2, 4, 2, 8, 48, max_positions=positions, qk_norm=seed % 2 == 1)
    model = LanguageModel(LanguageModelConfig(decoder, VOCABULARY))
    g = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=g)
        if weight.ndim > 1:
            weight.data.copy_(noise * weight.shape[1] ** -0.5)
        else:
            weight.data.add_(0.3 * noise)
    model.head.weight.data.mul_(spread)
    model.tokens.weight.data.mul_(6)
    return model.requires_grad_(False).eval()


def last_logits(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """Returns the float32 logits after the last token."""
    x = torch.tensor([tokens])
    hidden = model(x, torch.arange(len(tokens))[None], DenseAttention())
    return model.logits(hidden[0, -1]).float()


def processed(row: torch.Tensor, tokens: list[int], num_prompt: int, params: SamplingParams):
    """Returns one row of logits with every parameter applied, element by element."""
    logits = [float(v) for v in row]
    written = tokens[num_prompt:]
    for token, value in params.logit_bias.items():
        logits[token] += value
    if len(written) < params.min_tokens:
        for token in params.stop_token_ids:
            logits[token] = -math.inf
    for word in params.bad_words:
        before = list(word[:-1])
        if not before or tokens[-len(before) :] == before:
            logits[word[-1]] = -math.inf
    for token in range(len(logits)):
        if token in tokens:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        count = written.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.temperature == 0:
        return logits
    logits = [v / params.temperature for v in logits]
    if params.top_k:
        last = sorted(logits, reverse=True)[min(params.top_k, len(logits)) - 1]
        logits = [v if v >= last else -math.inf for v in logits]
    if params.top_p < 1:
        best = max(logits)
        total = sum(math.exp(v - best) for v in logits)
        mass, last = 0.0, best
        for v in sorted(logits, reverse=True):
            if mass >= params.top_p and v < last:
                break
            mass += math.exp(v - best) / total
            last = v
        logits = [v if v >= last else -math.inf for v in logits]
    if params.min_p:
        least = max(logits) + math.log(params.min_p)
        logits = [v if v >= least else -math.inf for v in logits]
    return logits


@torch.inference_mode()
def plain(model, prompt, params: SamplingParams):
    """Returns tokens, finish reason and stop token of plain decoding."""
    tokens, limit = list(prompt), model.config.decoder.max_positions
    while True:
        logits = processed(last_logits(model, tokens), tokens, len(prompt), params)
        row = torch.tensor(logits)
        if params.temperature:
            position = torch.tensor([len(tokens)])
            row = row + gumbel(torch.tensor([params.seed]), position, len(logits))[0]
        token = int(row.argmax())
        if token in params.stop_token_ids:
            return tokens[len(prompt) :], "stop", token
        tokens.append(token)
        if len(tokens) - len(prompt) == params.max_tokens or len(tokens) == limit:
            return tokens[len(prompt) :], "length", None


class TableDrafter(Drafter):
    """Drafts from the known text of each prompt.

    `kind` is one of these:

    - `right`: the next tokens of the text
    - `wrong`: never the right token
    - `tree`: random trees with right tokens, wrong tokens and duplicate siblings
    - `auxiliary`: the same, with some auxiliary nodes
    - `past`: right tokens and further ones after the end of the text
    - `mixed`: any of these
    """

    def __init__(self, kind: str, texts: dict[tuple[int, ...], list[int]]) -> None:
        self.kind, self.texts = kind, texts
        self.commits, self.forgotten = 0, []
        self.random = np.random.default_rng(7)

    def propose(self, contexts, budgets):
        return [self._one(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def _one(self, context, budget):
        if not budget.num_nodes:
            return empty_draft()
        kind = self.kind
        if kind == "mixed":
            kind = self.random.choice(["right", "wrong", "tree", "auxiliary", "past", "none"])
        if kind == "none":
            return empty_draft()
        prompt = tuple(context.tokens[: context.num_prompt])
        text = self.texts[prompt][context.num_output :]
        text += [int(t) for t in self.random.integers(0, VOCABULARY, 40)]
        if kind in ("right", "wrong", "past"):
            n = min(budget.num_nodes, budget.depth, 5)
            shift = 1 if kind == "wrong" else 0
            tokens = [(t + shift) % VOCABULARY for t in text[:n]]
            return TextDraft(torch.tensor(tokens), torch.arange(-1, n - 1), n)
        return self._tree(text, budget, auxiliary=kind == "auxiliary")

    def _tree(self, text, budget, auxiliary):
        """Returns nodes in preorder; each is below the previous node or one of its ancestors."""
        tokens, parents, depths, kinds = [], [], [], []
        size = int(self.random.integers(1, min(budget.num_nodes, 12) + 1))
        for node in range(size):
            parent = node - 1
            while parent >= 0 and (depths[parent] >= budget.depth or self.random.random() < 0.35):
                parent = parents[parent]
            depth = 1 if parent < 0 else depths[parent] + 1
            right = self.random.random() < 0.6
            tokens.append(text[depth - 1] if right else int(self.random.integers(VOCABULARY)))
            parents.append(parent)
            depths.append(depth)
            kinds.append(AUXILIARY if auxiliary and self.random.random() < 0.3 else CANDIDATE)
        return TextDraft(
            torch.tensor(tokens),
            torch.tensor(parents),
            max(depths),
            kinds=torch.tensor(kinds) if auxiliary else None,
        )

    def commit(self, outcomes):
        for outcome in outcomes:
            self.commits += 1
            n = len(outcome.draft)
            assert outcome.hidden.shape[0] == outcome.logits.shape[0] == n + 1
            kept = [int(outcome.draft.tokens[i]) for i in outcome.accepted]
            assert outcome.context.tokens[-len(kept) - 1 : -1] == kept

    def forget(self, context_id):
        self.forgotten.append(context_id)
