"""A recommender that was trained elsewhere: a language model whose tokens spell semantic ids.

An import (`recserve.formats`) renumbers its tokens and drops the rows that nothing reads:

    token   0 ..                level 0 | level 1 | ...      the codes, each level one slice
            after the levels    the other tokens of prompts
    head    0 ..                level 0 | level 1 | ...      as above
            after the levels    all other tokens, for the rule `vocabulary` alone

A code without a token leaves a gap in its level. Such a row is zero, and no item has it.
A prompt is stored as tokens too: those of a history of n items, with references in place of the
codes of its items. So a server needs no tokeniser and no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import Tensor, nn

from recserve.files import UnreadableFile, read_arrays, read_record, whole_file
from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.trie.native import LevelCodes, NativeDescent
from recserve.models.config import MAX_CODES, MAX_HISTORY, DecoderConfig
from recserve.models.decoder import Decoder
from recserve.models.packing import PackedLinear, pack_weights, packable
from recserve.models.prefix_template import CodeTable, Ints
from recserve.models.recommender import Recommender, is_imported, load_recommender
from recserve.models.scoring import Rule, Scoring
from recserve.models.weight_check import check_weights, read_weights
from recserve.models.write_tensors import write_tensors

PROMPT = "prompt.safetensors"
PROMPT_ARRAYS = ("tokens", "offsets", "gaps", "item_tokens", "item_offsets")
MAX_LEVELS = 64
GAP = -1e30  # logit of what is no token: its probability is 0, and a softmax over it alone is 1


@dataclass(frozen=True)
class ImportedConfig:
    """Configuration of an imported recommender, stored in `config.json`.

    Attributes:
        decoder: The layers.
        codebook_sizes: Codes of each level, as in the catalogue.
        level_offsets: Token of each level's code 0. Two levels may use the same tokens.
        num_token_levels: Levels whose codes are tokens. One more level may separate items that
            share an id.
        num_tokens: Rows of the embedding.
        num_outputs: Rows of the head.
        max_history_items: Most items of a history in a prompt.
        scoring: How items are scored unless a request says otherwise.
        num_end_levels: How many of the last token levels hold tokens after an id.
        scores_vocabulary: Whether the head has all tokens of the checkpoint.
        imported: Name of the format that it was imported from.
        item_texts: Whether the items of a prompt are texts of any length, with titles for example,
            in place of the codes of their ids.
        ended_code: Code of all levels after the end of an id that is shorter than others. None: all
            ids have the same length.

    Raises:
        ValueError: If a value does not fit; the message names the field.
    """

    decoder: DecoderConfig
    codebook_sizes: tuple[int, ...]
    level_offsets: tuple[int, ...]
    num_token_levels: int
    num_tokens: int
    num_outputs: int
    max_history_items: int
    scoring: Scoring
    num_end_levels: int
    scores_vocabulary: bool
    imported: str
    item_texts: bool = False
    ended_code: int | None = None

    def __post_init__(self) -> None:
        sizes = self.codebook_sizes
        if not 1 <= len(sizes) <= MAX_LEVELS or not all(1 <= n <= MAX_CODES for n in sizes):
            raise ValueError(
                f"codebook_sizes is {sizes!r:.80}; expected up to {MAX_LEVELS} sizes of 1 to "
                f"{MAX_CODES}"
            )
        if not len(sizes) - 1 <= self.num_token_levels <= len(sizes) or not self.num_token_levels:
            raise ValueError(
                f"num_token_levels is {self.num_token_levels}; codebook_sizes has {len(sizes)} "
                "levels, of which at most the last one has no tokens"
            )
        most = min(self.num_tokens, self.num_outputs)
        if len(self.level_offsets) != len(sizes) or not all(
            start >= 0 and start + (size if level < self.num_token_levels else 0) <= most
            for level, (start, size) in enumerate(zip(self.level_offsets, sizes, strict=False))
        ):
            raise ValueError(
                f"level_offsets is {self.level_offsets!r:.80}; expected the first token of each "
                f"level, within {most} tokens"
            )
        if not 1 <= self.max_history_items <= MAX_HISTORY:
            raise ValueError(
                f"max_history_items is {self.max_history_items}; expected 1..{MAX_HISTORY}"
            )
        if not 0 <= self.num_end_levels < self.num_token_levels:
            raise ValueError(
                f"num_end_levels is {self.num_end_levels}; expected 0 to below num_token_levels = "
                f"{self.num_token_levels}"
            )
        if self.ended_code is not None and not 0 <= self.ended_code < min(
            sizes[1 : self.num_token_levels], default=0
        ):
            raise ValueError(f"ended_code is {self.ended_code}; expected a code of all levels")
        if self.scoring.rule == "vocabulary" and not self.scores_vocabulary:
            raise ValueError("scoring.rule is 'vocabulary' and the head has other tokens alone")

    @property
    def normalization(self) -> Rule:
        """What the softmax of a level runs over."""
        return self.scoring.rule

    @property
    def autoregressive(self) -> bool:
        """True: it generates code after code."""
        return True

    @property
    def dense_head(self) -> bool:
        """False: it knows codes alone."""
        return False

    @property
    def level_heads(self) -> bool:
        """False: it knows codes alone."""
        return False


class ImportedTemplate:
    """The prompt of each number of items: tokens, and references to codes of the history.

    Attributes:
        max_items: Most items in a prompt.
        first_item: None: items are their codes.
        grows: False: a prompt may end with tokens of its own.
        block: 1: the prompt has the last items, as in training.
    """

    first_item = None
    grows = False
    block = 1

    def __init__(
        self,
        config: ImportedConfig,
        tokens: np.ndarray,
        offsets: np.ndarray,
        item_tokens: np.ndarray,
        item_offsets: np.ndarray,
    ) -> None:
        """Binds the prompts.

        Args:
            config: The model's configuration.
            tokens: [T] packed prompts. A number below 0 is a reference: -1 - (i * L + l) stands for
                the code of level l of item i, where L is `num_token_levels`. With `item_texts`,
                -1 - i stands for the text of item i.
            offsets: [max_items + 2] start of the prompt of 0, 1, ... items.
            item_tokens: Packed tokens of the items' texts; none without `item_texts`.
            item_offsets: [I + 1] start of each; [1] without `item_texts`.

        Raises:
            ValueError: If they do not fit each other or the configuration.
        """
        self.max_items, levels = config.max_history_items, config.num_token_levels
        integers = tokens.dtype.kind == "i" and offsets.dtype.kind == "i"
        if not integers or tokens.ndim != 1 or offsets.shape != (self.max_items + 2,):
            raise ValueError(
                f"prompts are {tokens.dtype} {tokens.shape} with offsets {offsets.dtype} "
                f"{offsets.shape}; expected integers [T] and [{self.max_items + 2}]"
            )
        sizes = np.diff(offsets)
        if int(offsets[0]) or int(offsets[-1]) != tokens.size or int(sizes.min()) < 1:
            raise ValueError("offsets of prompts do not divide them into parts of a token or more")
        texts = np.diff(item_offsets)
        if int(item_offsets[-1]) != item_tokens.size or int(texts.min(initial=1)) < 1:
            raise ValueError("item_offsets do not divide item_tokens into parts of a token or more")
        if item_tokens.size and not 0 <= item_tokens.min() <= item_tokens.max() < config.num_tokens:
            raise ValueError("item_tokens hold a token that is out of range")
        self._texts = (item_tokens.astype(np.int64), item_offsets) if config.item_texts else None
        lengths = np.where(tokens < 0, texts.max(initial=1), 1)
        whole = np.add.reduceat(lengths, offsets[:-1])
        longest = int(whole.max()) + len(config.codebook_sizes)
        if longest > config.decoder.max_positions:
            raise ValueError(
                f"a prompt and an id have {longest} tokens; the model has "
                f"{config.decoder.max_positions} positions"
            )
        scale = 1 if config.item_texts else levels
        limits = np.repeat(-scale * np.arange(self.max_items + 1), sizes)
        if (tokens < limits).any() or int(tokens.max(initial=0)) >= config.num_tokens:
            raise ValueError("prompts hold a token or a reference that is out of range")
        self._tokens = tokens.astype(np.int64)
        self._starts: list[int] = offsets.tolist()
        self._levels = levels
        self._offsets = np.array(config.level_offsets[:levels], np.int64)

    def tokens(self, rows: np.ndarray, codes: CodeTable, user: str | None = None) -> Ints:
        """Returns the tokens of a prompt. No user has tokens. See `PrefixTemplate`."""
        count = int(rows.size)
        if count > self.max_items:
            raise ValueError(f"a history of {count} items; at most {self.max_items} fit a prompt")
        if count and (int(rows.min()) < 0 or int(rows.max()) >= len(codes)):
            raise ValueError(
                f"item rows span {int(rows.min())}..{int(rows.max())}; the catalogue has "
                f"{len(codes)}"
            )
        prompt = self._tokens[self._starts[count] : self._starts[count + 1]].copy()
        if count and self._texts is not None:
            return self._with_texts(prompt, rows)
        if count:
            own = (codes[rows][:, : self._levels] + self._offsets).ravel()
            references = prompt < 0
            prompt[references] = own[-1 - prompt[references]]
        return prompt

    def _with_texts(self, prompt: Ints, rows: np.ndarray) -> Ints:
        """Returns a prompt with the texts of its items."""
        assert self._texts is not None
        tokens, starts = self._texts
        parts, done = list[Ints](), 0
        for at in np.flatnonzero(prompt < 0).tolist():
            row = int(rows[-1 - int(prompt[at])])
            parts += [prompt[done:at], tokens[starts[row] : starts[row + 1]]]
            done = at + 1
        return np.concatenate([*parts, prompt[done:]])


class ImportedModel(nn.Module):
    """A decoder with the rows of its embedding and its head that an import left.

    Attributes:
        items: None: it knows codes alone.
        search: The search in C, for the rule `children`.
    """

    items = None

    def __init__(self, config: ImportedConfig) -> None:
        super().__init__()
        self.config = config
        size = config.decoder.hidden_size
        self.tokens = nn.Embedding(config.num_tokens, size)
        self.decoder = Decoder(config.decoder)
        self.head = nn.Linear(size, config.num_outputs, bias=False)
        self.register_buffer("gaps", torch.empty(0, dtype=torch.int64), persistent=False)
        self.search: NativeDescent | None = None
        self._template: ImportedTemplate | None = None
        self._packed_levels: nn.ModuleList | None = None
        self._packed_head: nn.Module | None = None

    gaps: Tensor

    @property
    def template(self) -> ImportedTemplate:
        """How a history becomes a prompt."""
        assert self._template is not None, "no prompts are bound"
        return self._template

    def bind_prompts(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Binds prompts.

        Args:
            arrays: `tokens`, `offsets`, `item_tokens` and `item_offsets` of `ImportedTemplate`, and
                `gaps`: [n] the rows of the head that are no token, ascending.

        Raises:
            ValueError: If they do not fit the configuration.
        """
        prompts = {name: array for name, array in arrays.items() if name != "gaps"}
        self._template, gaps = ImportedTemplate(self.config, **prompts), arrays["gaps"]
        inside = gaps.ndim == 1 and gaps.dtype.kind == "i"
        if not inside or (gaps.size and not 0 <= gaps.min() <= gaps.max() < self.head.out_features):
            raise ValueError(f"gaps are {gaps.dtype} {gaps.shape}; expected rows of the head")
        self.gaps = torch.from_numpy(gaps.astype(np.int64)).to(self.head.weight.device)

    def bind_placeholders(self, vectors: Tensor) -> None:
        """Raises ValueError: no draft head can be trained on an imported recommender."""
        raise ValueError("an imported recommender has no `nezha` head")

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the inputs [..., E] of the layers for tokens [...]."""
        x: Tensor = self.tokens(tokens)
        return x

    def level_codes(self, level: int) -> Tensor:
        """Returns the rows [C_level, E] of the head at a level, zero without tokens."""
        size = self.config.codebook_sizes[level]
        if level >= self.config.num_token_levels:
            return self.head.weight.new_zeros(size, self.head.in_features)
        start = self.config.level_offsets[level]
        return self.head.weight[start : start + size]

    def level_logits(self, hidden: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes. hidden: [n, E].

        Gaps have logits of GAP.
        """
        packed = self._packed_levels
        logits: Tensor = (
            F.linear(hidden, self.level_codes(level)) if packed is None else packed[level](hidden)
        )
        if not self.gaps.numel() or level >= self.config.num_token_levels:
            return logits
        start = self.config.level_offsets[level]
        inside = (self.gaps >= start) & (self.gaps < start + logits.shape[1])
        return logits.index_fill(1, self.gaps[inside] - start, GAP)

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Returns raw logits [n, V] of all tokens, GAP at gaps. hidden: [n, E]."""
        head = self.head if self._packed_head is None else self._packed_head
        logits: Tensor = head(hidden)
        return logits.index_fill(1, self.gaps, GAP) if self.gaps.numel() else logits

    @torch.no_grad()
    def pack(self) -> None:
        """Packs the weights for this CPU (packing.py); it cannot be saved afterwards."""
        pack_weights(self.decoder)
        self._pack_outputs(self.config.normalization == "vocabulary")
        self.pack_search()

    @torch.no_grad()
    def pack_outputs(self) -> None:
        """Packs the rows of the head for every rule, and not for that of the model alone."""
        self._pack_outputs(self._packed_head is None)

    def _pack_outputs(self, whole: bool) -> None:
        """Packs the head for the rule `vocabulary`, or its levels for the others."""
        if not packable(self.head.weight):
            return
        if whole:
            self._packed_head = PackedLinear(self.head.weight)
        else:
            levels = range(len(self.config.codebook_sizes))
            packed = (PackedLinear(self.level_codes(level)) for level in levels)
            self._packed_levels = nn.ModuleList(packed)

    @torch.no_grad()
    def pack_search(self) -> None:
        """Packs the codes for searches on this CPU (kernels/trie/native.py)."""
        if self.config.normalization == "children" and backend_of(self.head.weight) is Backend.C:
            levels = range(len(self.config.codebook_sizes))
            self.search = NativeDescent([self._laid_out(level) for level in levels])

    def _laid_out(self, level: int) -> LevelCodes:
        packed = None if self._packed_levels is None else self._packed_levels[level]
        panels = packed.panels if isinstance(packed, PackedLinear) else None
        return LevelCodes.of(self.level_codes(level), panels)


def save_imported(model: ImportedModel, arrays: Mapping[str, np.ndarray], directory: Path) -> None:
    """Writes `config.json`, `model.safetensors` and the prompts.

    Args:
        model: The model.
        arrays: As in `ImportedModel.bind_prompts`, which checks them.
        directory: The folder.
    """
    model.bind_prompts(arrays)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(model.state_dict(), directory / "model.safetensors")
    with whole_file(directory / PROMPT) as new:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, new)
    text = json.dumps(asdict(model.config), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def load_imported(directory: Path, device: torch.device | str = "cpu") -> ImportedModel:
    """Reads what `save_imported` wrote, in eval mode. Raises ValueError naming the file."""
    config = read_record(directory / "config.json", ImportedConfig)
    path = directory / "model.safetensors"
    weights = read_weights(path)
    check_weights(ImportedModel, config, weights, path)
    with torch.device("meta"):
        model = ImportedModel(config)
    model.load_state_dict(weights, assign=True)
    model.gaps = torch.empty(0, dtype=torch.int64)
    try:
        model.bind_prompts(read_arrays(directory / PROMPT, PROMPT_ARRAYS))
    except ValueError as error:
        raise UnreadableFile(f"{directory / PROMPT}: {error}") from error
    return model.requires_grad_(False).to(device).eval()


def load_model(
    directory: Path | str,
    codes: Tensor,
    vectors: Tensor,
    device: torch.device | str = "cpu",
) -> Recommender | ImportedModel:
    """Loads the recommender of a bundle, whether it was trained here or imported.

    Args:
        directory: Folder of the recommender.
        codes: [I, L] semantic ids of the catalogue.
        vectors: [I, F] item vectors.
        device: Device of the model.

    Raises:
        ValueError: If the files are damaged or do not fit the catalogue.
    """
    folder = Path(directory)
    if not is_imported(folder):
        return load_recommender(folder, codes, vectors, device)
    model = load_imported(folder, device)
    sizes, highest = model.config.codebook_sizes, codes.amax(0).tolist()
    if len(sizes) != len(highest) or any(
        code >= size for code, size in zip(highest, sizes, strict=True)
    ):
        raise ValueError(
            f"{folder} does not fit the catalogue: its levels have {sizes} codes, and the largest "
            f"codes of the catalogue are {highest}"
        )
    return model
