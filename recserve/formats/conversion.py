"""Imports a checkpoint as a bundle: items with their ids, the model, its prompts and its rule."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from recserve.bundle import bundle as names
from recserve.bundle.bundle import Bundle, BundleError
from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.semantic_ids import SemanticIds, build_semantic_ids
from recserve.features.history.event_kinds import EventKinds
from recserve.features.tables.event_table import read_events
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable, read_items
from recserve.files import new_folder
from recserve.formats.checkpoint_format import CheckpointFormat, ImportFault, ImportOptions
from recserve.formats.prompts import compile_prompts, compile_text_prompts
from recserve.formats.registry import open_format
from recserve.models.config import MAX_CODES
from recserve.models.imported_model import (
    MAX_LEVELS,
    ImportedConfig,
    ImportedModel,
    save_imported,
)
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model, read_json
from recserve.models.scoring import Scoring
from recserve.tokenizer.token_bytes import UnsupportedTokenizer
from recserve.tokenizer.tokenizer import TextTokenizer

ENCODER_DECODERS = ("t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "encoder-decoder")
PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "adapter_model.bin")
EVENT_KINDS = EventKinds()


@dataclass(frozen=True)
class TokenMap:
    """The numbers that the tokens of a checkpoint get.

    Attributes:
        embedded: Token of the checkpoint of each row of the embedding, -1 for a gap.
        outputs: The same for the head.
        codebook_sizes: Codes of each level that has tokens.
        level_offsets: Row of each level's code 0.
    """

    embedded: np.ndarray
    outputs: np.ndarray
    codebook_sizes: tuple[int, ...]
    level_offsets: tuple[int, ...]

    @property
    def gaps(self) -> np.ndarray:
        """Rows of the head without a token."""
        return np.flatnonzero(self.outputs < 0)


def import_checkpoint(options: ImportOptions, log: Callable[[str], None] = print) -> Bundle:
    """Writes a bundle from a folder with weights. A failed import leaves nothing behind.

    Args:
        options: The folder, the items and how they are read.
        log: Called with each line of progress.

    Raises:
        ImportFault: If the folder or a file does not fit; the message says what to do.
        UnsupportedModel: If the model needs something that is not computed here.
        SchemaError: If a file of items or events is unreadable or has wrong columns.
        BundleError: If `out` is not empty.
    """
    started, out = time.monotonic(), Path(options.out)
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise BundleError(f"{out}: not empty; choose another folder or delete this one")
    if blocked := next((up for up in out.parents if up.exists() and not up.is_dir()), None):
        raise BundleError(f"{out}: {blocked} is a file; choose another folder")
    chosen = open_format(options)
    check_folder(options.folder)
    items, bad = read_items(options.items, columns=options.columns)
    for line in bad.lines():
        log(line)
    events: EventLog | None = None
    popularity = np.zeros(len(items), np.float32)
    if options.events is not None:
        events, bad = read_events(options.events, items, columns=options.columns)
        for line in bad.lines():
            log(line)
        train = events.positive(EVENT_KINDS).leave_one_out().train
        popularity = train.popularity(len(items))
    texts = chosen.read_texts(items.ids)
    codes = None if texts is not None else chosen.read_ids(items.ids)
    try:
        tokenizer = TextTokenizer.open(options.folder)
    except UnsupportedTokenizer as error:
        raise ImportFault(f"{error}{tokenizer_hint(options.folder)}") from None
    chosen.open_tokenizer(tokenizer)
    ended: int | None = None
    if codes is None:
        assert texts is not None
        codes, tokens, ended = _text_tokens(tokenizer, items, texts)
        slices = [""] * len(tokens)
    else:
        tokens = _code_tokens(chosen, tokenizer, items, codes)
        slices = list(chosen.spelling.pieces)
        texts = [chosen.spelling.spell(one) for one in codes.tolist()]
    rule = options.rule or chosen.rule
    most = options.max_history or chosen.max_history
    try:
        ending = chosen.ending_tokens(tokenizer)
    except ImportFault:
        if rule == "vocabulary":
            raise
        ending = ()
    whole = rule == "vocabulary" or not options.only_rule
    source = load_language_model(options.folder)
    _check_tokens(options.folder, source, tokens, ending)

    def encode(history: Sequence[Sequence[int]]) -> list[int]:
        return chosen.encode(
            tokenizer, chosen.prompt([chosen.spelling.spell(one) for one in history])
        )

    parts = chosen.item_texts(items, texts)
    own: list[list[int]] = []
    if parts is None:
        prompts, used = compile_prompts(encode, tokens, most)
    else:
        prompts, own = compile_text_prompts(
            chosen.prompt,
            partial(chosen.encode, tokenizer),
            lambda text, first: tokenizer.encode(text, special=first),
            parts,
            most,
        )
        used = {token for one in (*own, *(p.tolist() for p in prompts)) for token in one}
        used = {token for token in used if token >= 0}
    size = source.config.vocab_size
    numbers = _number(slices, tokens, ending, used, size, whole, ended is not None)
    codes = np.concatenate([codes, np.zeros((len(codes), len(ending)), np.int64)], 1)
    order = np.zeros_like(popularity) if options.shared_ids == "first" else popularity
    if options.shared_ids == "popular" and (given := chosen.priority(items.ids)) is not None:
        order = given
    index, _ = build_semantic_ids(items.ids, codes.astype(np.uint16), numbers.codebook_sizes, order)
    separate = (0,) * index.has_disambiguation
    config = ImportedConfig(
        decoder=source.config.decoder,
        codebook_sizes=index.codebook_sizes,
        level_offsets=numbers.level_offsets + separate,
        num_token_levels=len(numbers.level_offsets),
        num_tokens=len(numbers.embedded),
        num_outputs=len(numbers.outputs),
        max_history_items=most,
        scoring=Scoring(
            rule,
            end_tokens=rule == "vocabulary" and bool(ending),
            length_penalty=chosen.length_penalty,
        ),
        num_end_levels=len(ending),
        scores_vocabulary=whole,
        imported=chosen.name,
        ended_code=ended,
        item_texts=parts is not None,
    )
    model = _model(config, source, numbers)
    levels = 1 if config.item_texts else len(tokens)
    packed, offsets = _renumber(prompts, numbers, levels, config)
    arrays = {"tokens": packed, "offsets": offsets, "gaps": numbers.gaps}
    arrays |= _item_tokens(own, numbers)
    with new_folder(out) as folder:
        bundle = Bundle.create(folder)
        vectors = np.zeros((len(items), 1), np.float32)  # nothing reads vectors of these items
        catalog = Catalog("", items, index, popularity, vectors)
        catalog.save(folder / names.CATALOG, folder / names.VECTORS)
        if events is not None:
            table = events.to_arrow(items.ids)
            pq.write_table(table, folder / names.EVENTS, compression="zstd")
        bundle.commit("build", _record(options, events))
        try:
            save_imported(model, arrays, folder / "recommender")
        except ValueError as error:
            raise ImportFault(f"{options.folder.name}: {error}") from None
        bundle.commit("recommender", {"imported": chosen.name, "rule": rule})
    for line in _lines(options, chosen, index, config, time.monotonic() - started):
        log(line)
    return Bundle.open(out)


def check_folder(folder: Path) -> None:
    """Raises ImportFault for folders that need a conversion first, and says which."""
    if not folder.is_dir():
        raise ImportFault(f"{folder} is no folder; expected one in the Hugging Face layout")
    if not (folder / "config.json").exists() and list(folder.glob("adapter_*")):
        raise ImportFault(
            f"{folder.name} holds a LoRA adapter alone; merge it into its base model first, with "
            "peft: PeftModel.from_pretrained(base, FOLDER).merge_and_unload().save_pretrained(NEW)"
        )
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if not (folder / "config.json").exists() and pickled:
        raise ImportFault(
            f"{folder.name} holds {pickled[0]} and no config.json. Such files are pickled, and "
            "those of TIGER's family (GRID, RQ-VAE-Recommender, MemGen) are encoder-decoders; "
            "imports read folders of llama, qwen2 and qwen3 in the Hugging Face layout"
        )
    fields = read_json(folder / "config.json")
    family = str(fields.get("model_type"))
    if family in ENCODER_DECODERS or fields.get("is_encoder_decoder") is True:
        raise ImportFault(
            f"{folder.name} is an encoder-decoder ({family}), as TIGER and LETTER-TIGER are; "
            "imports read decoders of the families llama, qwen2 and qwen3"
        )
    if pickled and not list(folder.glob("*.safetensors*")):
        raise ImportFault(
            f"{folder.name} holds pickled weights ({pickled[0]}), which are not read because "
            "unpickling runs code; convert them with transformers where you trust them: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW, "
            "safe_serialization=True), and AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(NEW)"
        )


def tokenizer_hint(folder: Path) -> str:
    """Returns how a folder gets the tokeniser that it lacks."""
    if (folder / "tokenizer.json").exists():
        return ""
    if not (folder / "tokenizer.model").exists():
        return (
            "; save it there with transformers: AutoTokenizer.from_pretrained(ORIGINAL)"
            ".save_pretrained(FOLDER)"
        )
    return (
        "; tokenizer.model is a slow tokeniser, convert it with transformers and sentencepiece: "
        "AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER), and compare "
        "the tokens of a prompt"
    )


def _code_tokens(
    chosen: CheckpointFormat, tokenizer: TextTokenizer, items: ItemTable, codes: np.ndarray
) -> list[dict[int, int]]:
    """Returns the token of each code of each level, of the whole vocabulary.

    Raises:
        ImportFault: If the id of an item needs a token that does not exist.
    """
    spelling = chosen.spelling
    vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    found: list[dict[int, int]] = []
    for level in range(spelling.num_levels):
        pattern = re.compile(spelling.pattern(level))
        matches = ((pattern.fullmatch(text), token) for text, token in vocabulary.items())
        known = {int(match[1]): token for match, token in matches if match}
        found.append({code: known[code] for code in sorted(known) if code < MAX_CODES})
        lacking = [row for row, code in enumerate(codes[:, level].tolist()) if code not in known]
        if lacking:
            text = spelling.spell_code(level, int(codes[lacking[0], level]))
            count = len(tokenizer.encode(text, special=False))
            raise ImportFault(
                f"{chosen.options.folder.name}: item {items.ids[lacking[0]][:80]!r} has the code "
                f"{text}, which is no token of tokenizer.json but {count} of them; each code must "
                "be a token of its own. Is this the map that the model was trained with?"
            )
    return found


def _check_tokens(
    folder: Path, source: LanguageModel, tokens: list[dict[int, int]], ending: Sequence[int]
) -> None:
    highest = max([*(token for level in tokens for token in level.values()), *ending])
    if highest >= source.config.vocab_size:
        raise ImportFault(
            f"{folder.name}: tokenizer.json has a token {highest}, but the model has "
            f"{source.config.vocab_size} rows; this tokeniser belongs to another model"
        )


def _text_tokens(
    tokenizer: TextTokenizer, items: ItemTable, texts: Sequence[str]
) -> tuple[np.ndarray, list[dict[int, int]], int | None]:
    """Returns the codes of ids that are texts, the token of each code, and the code of ended ids.

    All levels have the same codes: the tokens that any id has. The last one is that of ended ids,
    if ids have different lengths.

    Raises:
        ImportFault: If an id is too long, or the beginning of another one.
    """
    found = [tokenizer.encode(text, special=False) for text in texts]
    longest = max(len(one) for one in found)
    for row, one in enumerate(found):
        if not 1 <= len(one) < MAX_LEVELS:
            raise ImportFault(
                f"item {items.ids[row][:80]!r}: its id {texts[row][:80]!r} has {len(one)} tokens; "
                f"expected 1 to {MAX_LEVELS - 1}"
            )
    by_tokens = sorted((tuple(one), row) for row, one in enumerate(found))
    for (short, row), (other, row_of_other) in pairwise(by_tokens):
        if len(short) < len(other) and other[: len(short)] == short:
            raise ImportFault(
                f"the id {texts[row][:80]!r} of item {items.ids[row][:80]!r} is the beginning of "
                f"{texts[row_of_other][:80]!r}; give --id-format an end, such as [{{text}}]"
            )
    used = sorted({token for one in found for token in one})
    if len(used) >= MAX_CODES:
        raise ImportFault(f"the ids have {len(used)} different tokens; expected below {MAX_CODES}")
    code_of = {token: code for code, token in enumerate(used)}
    codes = np.full((len(found), longest), len(used), np.int64)
    for row, one in enumerate(found):
        codes[row, : len(one)] = [code_of[token] for token in one]
    ended = len(used) if min(len(one) for one in found) < longest else None
    return codes, [dict(enumerate(used))] * longest, ended


def _item_tokens(own: Sequence[Sequence[int]], numbers: TokenMap) -> dict[str, np.ndarray]:
    """Returns the packed tokens of each item's text in the new numbers, and their offsets."""
    new = _new_numbers(numbers)
    tokens = np.array([new[token] for one in own for token in one], np.int32)
    offsets = np.cumsum([0, *(len(one) for one in own)]).astype(np.int64)
    return {"item_tokens": tokens, "item_offsets": offsets}


def _number(
    slices: Sequence[str],
    tokens: list[dict[int, int]],
    ending: Sequence[int],
    used: set[int],
    vocab_size: int,
    whole: bool,
    ends: bool,
) -> TokenMap:
    """Numbers the tokens: the levels first, then the others.

    Args:
        slices: Name of the slice of each level. Levels of one name have the same tokens.
        tokens: The token of each code of each level.
        ending: Tokens after an id that are scored, each a level of one code.
        used: Tokens of prompts.
        vocab_size: Rows of the checkpoint's embedding.
        whole: Whether the head has all tokens.
        ends: Whether each level has one more code, without a token, of ids that have ended.
    """
    rows: list[int] = []
    starts: dict[str, int] = {}
    sizes, offsets = list[int](), list[int]()
    for level, known in enumerate(tokens):
        piece, size = slices[level], max(known) + 1 + ends
        if piece not in starts:
            starts[piece] = len(rows)
            rows += [known.get(code, -1) for code in range(size)]
        sizes.append(size)
        offsets.append(starts[piece])
    for token in ending:
        sizes.append(1)
        offsets.append(len(rows))
        rows.append(token)
    there = set(rows)
    others = sorted(used - there)
    rest = sorted(set(range(vocab_size)) - there) if whole else []
    return TokenMap(np.array(rows + others), np.array(rows + rest), tuple(sizes), tuple(offsets))


@torch.no_grad()
def _model(config: ImportedConfig, source: LanguageModel, numbers: TokenMap) -> ImportedModel:
    """Returns the model with the rows of the checkpoint that it needs, in their new order."""
    with torch.device("meta"):
        model = ImportedModel(config)
    head = source.tokens.weight
    if source.head is not None:
        assert isinstance(source.head, torch.nn.Linear)
        head = source.head.weight
    weights = {f"decoder.{name}": weight for name, weight in source.decoder.state_dict().items()}
    weights["tokens.weight"] = _rows(source.tokens.weight, numbers.embedded)
    weights["head.weight"] = _rows(head, numbers.outputs)
    model.load_state_dict(weights, assign=True)
    model.gaps = torch.empty(0, dtype=torch.int64)
    return model.requires_grad_(False).eval()


def _rows(table: Tensor, rows: np.ndarray) -> Tensor:
    wanted = torch.from_numpy(rows).to(torch.int64)
    taken = table[wanted.clamp(min=0)]
    taken[wanted < 0] = 0
    return taken


def _renumber(
    prompts: Sequence[np.ndarray], numbers: TokenMap, levels: int, config: ImportedConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed prompts in the new numbers, and their offsets.

    A reference counts the levels with tokens, of which an ending adds some.
    """
    new = _new_numbers(numbers)
    packed = np.concatenate(list(prompts))
    places, level = np.divmod(-1 - np.minimum(packed, -1), levels)
    scale = 1 if config.item_texts else config.num_token_levels
    references = -1 - (places * scale + level)
    tokens = [new[token] if token >= 0 else 0 for token in packed.tolist()]
    packed = np.where(packed < 0, references, np.array(tokens)).astype(np.int32)
    return packed, np.cumsum([0, *(len(prompt) for prompt in prompts)]).astype(np.int64)


def _new_numbers(numbers: TokenMap) -> dict[int, int]:
    """Returns the first new number of each token of the checkpoint."""
    return {token: row for row, token in reversed(list(enumerate(numbers.embedded.tolist())))}


def _record(options: ImportOptions, events: EventLog | None) -> dict[str, Any]:
    """Returns the manifest's build section: no quantiser, and what the import chose."""
    record: dict[str, Any] = {"shared_ids": options.shared_ids}
    if events is not None:
        record |= {
            "num_users": events.num_users,
            "num_events": events.num_events,
            "type_names": list(events.type_names),
            "has_timestamps": events.has_timestamps,
        }
    return record


def _lines(
    options: ImportOptions,
    chosen: CheckpointFormat,
    index: SemanticIds,
    config: ImportedConfig,
    seconds: float,
) -> list[str]:
    lines = []
    if index.has_disambiguation:
        extra = int((index.codes[:, -1] > 0).sum())
        lines.append(
            f"{extra} items share the id of another item; --shared-ids {options.shared_ids} "
            + (
                "recommends all of them"
                if options.shared_ids == "all"
                else "recommends one item of each id"
            )
        )
    return [
        *lines,
        f"{index.num_items} items, format {chosen.name}, rule {config.scoring.rule}, up to "
        f"{config.max_history_items} items in a prompt",
        f"bundle in {options.out}, {seconds:.1f} s",
    ]
