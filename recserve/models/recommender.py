"""The recommender: a decoder over a history that generates the next item's semantic id.

Two input forms share one token space (docs/concepts/semantic-ids.md). With `codes`, a history item
is its L code tokens, and the model is a plain Llama. With `items`, a history item is one position:
the sum of its level embeddings, its projected frozen vector and its id embedding. Prefixes are L
times shorter then; generated tokens are still codes. Source of the generation: TIGER (arXiv
2305.05065). Level heads, which predict all levels at once, are in models/level_heads.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.files import read_json_object, read_record
from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.trie.native import LevelCodes, NativeDescent
from recserve.models.attention import Attend
from recserve.models.config import RecommenderConfig
from recserve.models.decoder import AuxHiddenStates, Decoder
from recserve.models.growable_table import with_rows
from recserve.models.history_bonus import HistoryBonus, load_history_bonus
from recserve.models.level_heads import LevelHead, LevelTables, stack_heads
from recserve.models.packing import PackedLinear, pack_layers, pack_weights, packable
from recserve.models.prefix_template import BOS, HistoryTemplate
from recserve.models.weight_check import check_weights, read_weights
from recserve.models.write_tensors import write_tensors

IMPORTED = "imported"  # field of a config.json that models/imported_model.py reads


class Recommender(nn.Module):
    """Embedding, decoder and heads; `bind_items` sets the catalogue that item tokens need."""

    item_tokens: Tensor
    item_vectors: Tensor | None
    placeholders: Tensor | None

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        self.config = config
        self.template = HistoryTemplate.of(config)
        size = config.decoder.hidden_size
        self.tokens = nn.Embedding(config.num_code_tokens, size)
        self.decoder = Decoder(config.decoder)
        self.head = nn.Linear(size, config.num_code_tokens, bias=False)
        if config.vector_dim:
            self.vector_projection = nn.Linear(config.vector_dim, size, bias=False)
        if config.id_embedding:
            self.ids = nn.Embedding(config.num_items, size)
        if config.dense_head:
            self.dense_query = nn.Linear(size, size, bias=False)
            self.dense_scale = nn.Parameter(torch.tensor(1 / 0.07))
        if config.level_heads:
            self.level_heads = nn.ModuleList(LevelHead(size) for _ in range(config.num_levels))
        self.register_buffer("item_tokens", torch.empty(0, config.num_levels).long(), False)
        self.register_buffer("item_vectors", None, False)
        self.register_buffer("placeholders", None, False)
        self.num_bound_items = 0
        self.history_bonus: HistoryBonus | None = None
        self._trained_rows: Tensor | None = None
        self._dense_table: Tensor | None = None
        self._packed_levels: nn.ModuleList | None = None
        self._packed_head: nn.Module | None = None
        self.one_by_one = False
        self.search: NativeDescent | None = None
        self.apply(_initialise)
        if config.tied:
            self.head.weight = self.tokens.weight
        if config.dense_head:
            nn.init.eye_(self.dense_query.weight)

    @property
    def items(self) -> Recommender:
        """The model itself: it knows the items that are bound (`ItemTables`)."""
        return self

    def bind_items(self, codes: Tensor, vectors: Tensor | None = None) -> None:
        """Binds the catalogue that `items` embeds and the dense head scores.

        codes: [I, L] int. vectors: [I, F] float, required if config.vector_dim is set; rows are
        scaled to length 1 here. Raises ValueError if they do not fit the config.
        """
        c = self.config
        if codes.ndim != 2 or codes.shape[1] != c.num_levels:
            raise ValueError(
                f"codes are {tuple(codes.shape)}; the model has {c.num_levels} levels, [I, L]"
            )
        if c.vector_dim:
            wanted = (codes.shape[0], c.vector_dim)
            if vectors is None or tuple(vectors.shape) != wanted:
                came = None if vectors is None else tuple(vectors.shape)
                raise ValueError(f"vectors are {came}; this model needs {wanted}, [I, F]")
        device = self.tokens.weight.device
        offsets = torch.tensor(c.level_offsets, device=device)
        self.item_tokens = codes.to(device, torch.int64) + offsets
        if c.vector_dim and vectors is not None:
            self.item_vectors = F.normalize(vectors.to(device, torch.float32), dim=-1)
        self.num_bound_items = codes.shape[0]
        self._trained_rows = self._dense_table = None

    def bind_placeholders(self, vectors: Tensor) -> None:
        """Binds the learned vectors [P, E] of a draft head: token -1 is the first, -2 the next."""
        self.placeholders = vectors.detach()

    @torch.inference_mode()
    def append_items(self, codes: Tensor, vectors: Tensor, trained_rows: Tensor) -> None:
        """Appends items, while others read the items that are bound.

        codes [n, L], vectors [n, F]: as in bind_items. trained_rows [n]: row of the
        trained item whose id embedding the item uses, -1 for none.
        """
        count, device = self.num_bound_items, self.item_tokens.device
        offsets = torch.tensor(self.config.level_offsets, device=device)
        self.item_tokens = with_rows(self.item_tokens, count, codes.to(device) + offsets)
        if self.item_vectors is not None:
            unit = F.normalize(vectors.to(device, torch.float32), dim=-1)
            self.item_vectors = with_rows(self.item_vectors, count, unit)
        known = (
            torch.arange(count, device=device) if self._trained_rows is None else self._trained_rows
        )
        self._trained_rows = with_rows(known, count, trained_rows)
        # A concurrent reader may have built a table with fewer rows. It is then rebuilt on use.
        table = self._dense_table
        if table is not None and table.shape[0] >= count:
            rows = torch.arange(count, count + len(codes), device=device)
            self._dense_table = with_rows(table, count, self.dense_item_rows(rows))
        self.num_bound_items = count + len(codes)

    def embed_items(self, rows: Tensor) -> Tensor:
        """Returns the decoder's input [..., E] for history items. rows: any shape [...]."""
        x: Tensor
        codes = self.item_tokens[rows]
        if self.training:  # the same sums, without a tensor [..., L, E] and its gradient
            bags = codes.view(-1, codes.shape[-1])
            x = F.embedding_bag(bags, self.tokens.weight, mode="sum")
            x = x.view(*rows.shape, self.tokens.embedding_dim)
        else:
            x = self.tokens(codes).sum(-2)
        if self.item_vectors is not None:
            x = x + self.vector_projection(self.item_vectors[rows])
        if self.config.id_embedding:
            ids = rows if self._trained_rows is None else self._trained_rows[rows]
            known = (ids >= 0) & (ids < self.config.num_items)
            x = x + torch.where(known[..., None], self.ids(torch.where(known, ids, 0)), 0)
        return x

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds tokens [...] as [..., E]: codes, items, and placeholders if they are bound."""
        x = self.tokens(tokens) if self._are_codes(tokens) else self._embed_any(tokens)
        if self.training:
            x = F.dropout(x, self.config.decoder.dropout)
        return x

    def _are_codes(self, tokens: Tensor) -> bool:
        """Returns whether all tokens are known to be codes, without waiting for a device."""
        if self.placeholders is None and self.config.input == "codes":
            return True
        if self.training or not tokens.is_cpu or not tokens.numel():
            return False
        low, high = torch.aminmax(tokens)
        return int(low) >= BOS and int(high) < self.config.num_code_tokens

    def _embed_any(self, tokens: Tensor) -> Tensor:
        own = tokens if self.placeholders is None else tokens.clamp(min=BOS)
        first_item = self.config.num_code_tokens
        x: Tensor
        if self.config.input == "codes":
            x = self.tokens(own)
        else:
            is_item = own >= first_item
            x = self.tokens(torch.where(is_item, BOS, own))
            # on other devices, counting the items would synchronise with the host
            if tokens.device.type == "cpu":
                x = x.index_put((is_item,), self.embed_items(own[is_item] - first_item))
            else:
                rows = torch.where(is_item, own - first_item, 0)
                x = torch.where(is_item[..., None], self.embed_items(rows), x)
        if self.placeholders is not None:
            placeholder_states = self.placeholders[(-1 - tokens).clamp(min=0)]
            x = torch.where((tokens < BOS)[..., None], placeholder_states, x)
        return x

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """Returns hidden states [..., T, E] of tokens and positions [..., T], or only of `rows`."""
        hidden: Tensor = self.decoder(self.embed(tokens), positions, attend, rows, aux_states)
        return hidden

    def level_logits(self, hidden: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes. hidden: [n, E]."""
        if self._packed_levels is not None:
            packed: Tensor = self._packed_levels[level](hidden)
            return packed
        return F.linear(hidden, self.level_codes(level))

    def level_codes(self, level: int) -> Tensor:
        """Returns the codes [C_level, E] that a hidden state is compared with at a level."""
        start = self.config.level_offsets[level]
        return self.head.weight[start : start + self.config.codebook_sizes[level]]

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Returns raw logits [n, V] of BOS and all codes. hidden: [n, E]."""
        head = self.head if self._packed_head is None else self._packed_head
        logits: Tensor = head(hidden)
        return logits

    @torch.no_grad()
    def pack(self) -> None:
        """Packs the weights for this CPU (packing.py); it cannot be trained or saved afterwards."""
        pack_weights(self.decoder)
        pack_layers(self, "vector_projection", "dense_query")
        if packable(self.head.weight):
            books = [self.level_codes(level) for level in range(self.config.num_levels)]
            packed = (PackedLinear(book) for book in books)
            self._packed_levels = nn.ModuleList(packed)
            self._packed_head = PackedLinear(self.head.weight)
        self.pack_search()

    @torch.no_grad()
    def pack_search(self) -> None:
        """Packs the current codes for searches on this CPU (kernels/trie/native.py)."""
        if self.config.normalization == "children" and backend_of(self.head.weight) is Backend.C:
            self.search = NativeDescent([self._laid_out(n) for n in range(self.config.num_levels)])

    def _laid_out(self, level: int) -> LevelCodes:
        packed = None if self._packed_levels is None else self._packed_levels[level]
        panels = packed.panels if isinstance(packed, PackedLinear) else None
        return LevelCodes.of(self.level_codes(level), panels)

    def parallel_logits(self, hidden: Tensor, level: int) -> Tensor:
        """Returns logits [n, C_level] of a level from the prefix's last hidden state [n, E] alone.

        Raises:
            ValueError: If the model has no level heads.
        """
        if not self.config.level_heads:
            raise ValueError("this recommender was trained without level heads")
        state = self.level_heads[level](hidden)
        if not self.config.level_temperature:
            return self.level_logits(state, level)
        codes = F.normalize(self.level_codes(level), dim=-1)
        return F.linear(F.normalize(state, dim=-1), codes) / self.config.level_temperature

    @torch.no_grad()
    def level_tables(self) -> LevelTables:
        """Returns the current level heads stacked, for `parallel_logits` of all levels at once.

        Raises:
            ValueError: If the model has no level heads.
        """
        if not self.config.level_heads:
            raise ValueError("this recommender was trained without level heads")
        codebooks = [self.level_codes(level) for level in range(self.config.num_levels)]
        return stack_heads(self.level_heads, codebooks, self.config.level_temperature)

    def dense_query_rows(self, hidden: Tensor) -> Tensor:
        """Returns the queries [n, E] of the dense head, scaled. hidden: [n, E]."""
        return F.normalize(self.dense_query(hidden), dim=-1) * self.dense_scale

    def dense_scores(
        self, hidden: Tensor, num_items: int | None = None, without: Tensor | None = None
    ) -> Tensor:
        """Returns log-probabilities [n, I] float32 of the first `num_items` bound items (None:
        all).

        hidden: [n, E]. without: rows to exclude, which get -inf. With `one_by_one`, each query is
        computed separately. Raises ValueError if the model has no dense head.
        """
        if not self.config.dense_head:
            raise ValueError("this recommender was trained without a dense head")
        query = self.dense_query_rows(hidden)
        items = self.dense_item_rows()[:num_items].to(query.dtype)
        # A product with one query adds in another order than one with several.
        rows = torch.split(query, 1) if self.one_by_one else (query,)
        logits = torch.cat([F.linear(row, items) for row in rows]).float()
        if without is not None:
            logits[:, without] = float("-inf")
        return logits.log_softmax(-1)

    def train(self, mode: bool = True) -> Recommender:
        """Switches to training or back; drops the item table and, in training, packed codes."""
        self._dense_table = None
        if mode:
            self.search = None
        super().train(mode)
        return self

    def dense_item_rows(self, rows: Tensor | None = None) -> Tensor:
        """Returns unit rows [I, E] of all bound items, or [n, E] of some.

        Those of all items are cached while the weights cannot change (eval mode without gradients).
        """
        if rows is not None:
            return F.normalize(self.embed_items(rows), dim=-1)
        table, count, device = self._dense_table, self.num_bound_items, self.item_tokens.device
        if table is not None and table.device == device and table.shape[0] >= count:
            return table[:count]
        rows = torch.arange(count, device=device)
        table = F.normalize(self.embed_items(rows), dim=-1)
        if not self.training and not torch.is_grad_enabled():
            self._dense_table = table
        return table


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, LevelHead):  # apply() reaches it after its linear layer
        nn.init.zeros_(module.linear.weight)
        nn.init.zeros_(module.linear.bias)


def save_recommender(model: Recommender, directory: Path | str) -> None:
    """Writes `config.json` and `model.safetensors`; the catalogue belongs to the bundle."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = model.state_dict()
    if model.config.tied:
        del weights["head.weight"]
    write_tensors(weights, directory / "model.safetensors")
    text = json.dumps(model.config.to_dict(), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def is_imported(directory: Path) -> bool:
    """Returns whether a folder holds a recommender that was trained elsewhere."""
    return IMPORTED in read_json_object(directory / "config.json")


def load_recommender(
    directory: Path | str,
    codes: Tensor | None = None,
    vectors: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Recommender:
    """Reads what `save_recommender` wrote, in eval mode; binds the catalogue if `codes` is given.

    codes: [I, L]. vectors: [I, F]. Raises FileNotFoundError, or ValueError naming the file that
    does not fit.
    """
    directory = Path(directory)
    if is_imported(directory):
        raise ValueError(
            f"{directory} holds an imported recommender; this needs one that was trained here, "
            "with recserve train recommender"
        )
    config = read_record(directory / "config.json", RecommenderConfig)
    path = directory / "model.safetensors"
    weights = read_weights(path)
    if config.tied and (embedding := weights.get("tokens.weight")) is not None:
        weights.setdefault("head.weight", embedding)  # the file of a tied model has none
    check_weights(Recommender, config, weights, path)
    if config.tied and not torch.equal(weights["head.weight"], weights["tokens.weight"]):
        raise ValueError(
            f"{path}: head.weight differs from tokens.weight, and config.json says that they are "
            "tied; remove head.weight, or set tied to false"
        )
    model = Recommender(config)
    model.load_state_dict(weights)
    model.to(device)
    if codes is not None:
        try:
            model.bind_items(codes, vectors)
        except ValueError as error:
            raise ValueError(f"{path} does not fit the catalogue: {error}") from error
    model.history_bonus = load_history_bonus(directory, config.num_items)
    return model.eval()
