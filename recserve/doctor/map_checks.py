"""What a map of ids says of a recommender before its import: traps that the weights do not show."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recserve.doctor.finding import Finding
from recserve.formats.checkpoint_format import CheckpointFormat
from recserve.models.language_model import LanguageModelConfig
from recserve.tokenizer.tokenizer import TextTokenizer

GIB = 1 << 30


@dataclass(frozen=True)
class MappedCheckpoint:
    """A checkpoint whose items have ids.

    Attributes:
        chosen: Its format.
        tokenizer: Its tokeniser.
        config: Its model.
        value_bytes: Bytes of a weight, and of a number in a cache of the original.
        item_ids: [I] items.
        codes: [I, L] their codes; None if ids are texts.
        texts: [I] texts of their ids.
        ids: [I] tokens of these texts, as the tokeniser makes them.
        parts: [I] their texts in a prompt.
        rule: The scoring rule of the import.
        max_history: Most items in a prompt.
    """

    chosen: CheckpointFormat
    tokenizer: TextTokenizer
    config: LanguageModelConfig
    value_bytes: int
    item_ids: Sequence[str]
    codes: np.ndarray | None
    texts: Sequence[str]
    ids: Sequence[tuple[int, ...]]
    parts: Sequence[str]
    rule: str
    max_history: int

    @property
    def longest(self) -> int:
        """Most tokens of an id."""
        return max(len(one) for one in self.ids)

    def level_tokens(self, level: int) -> list[int]:
        """Returns the tokens of a level: of all its codes, whether an item has them or not."""
        if self.codes is None:  # texts have the tokens of all ids at all levels
            return sorted({token for one in self.ids for token in one})
        pattern = re.compile(self.chosen.spelling.pattern(level))
        vocabulary = self.tokenizer.tokenizer.get_vocab(with_added_tokens=True)
        return sorted(token for text, token in vocabulary.items() if pattern.fullmatch(text))

    def prompt(self, rows: Sequence[int]) -> list[int]:
        """Returns the tokens of a prompt, as the format makes them of a history of item rows."""
        texts = self.chosen.prompt([self.parts[row] for row in rows])
        return self.chosen.encode(self.tokenizer, texts)

    def end_tokens(self) -> tuple[int, ...]:
        """Returns the tokens after an id that this rule scores."""
        return self.chosen.ending_tokens(self.tokenizer) if self.rule == "vocabulary" else ()


def examine_map(given: MappedCheckpoint) -> list[Finding]:
    """Returns what is known of a checkpoint and its map. Raises ImportFault."""
    checks = (
        _shared,
        _lengths,
        _offsets,
        _compare_masks,
        _first_level,
        _prompt,
        _rule,
        _divisor,
        _memory,
    )
    return [one for check in checks if (one := check(given)) is not None]


def _shared(given: MappedCheckpoint) -> Finding | None:
    counts = Counter(given.texts)
    if len(counts) == len(given.texts):
        return Finding("shared ids", "ok", f"{len(counts)} items have {len(counts)} ids")
    text, most = counts.most_common(1)[0]
    return Finding(
        "shared ids",
        "warn",
        f"{len(given.texts)} items have {len(counts)} ids; {text[:80]} belongs to {most} items. "
        "A figure that compares ids counts a hit for each of them. "
        "--shared-ids says which of them are recommended, and hits are items here",
    )


def _lengths(given: MappedCheckpoint) -> Finding | None:
    """Finds ids of different numbers of tokens."""
    least, most = min(len(one) for one in given.ids), given.longest
    if least == most:
        return None
    return Finding(
        "lengths",
        "warn",
        f"ids have {least} to {most} tokens: a sum of log-probabilities favours short ones, and "
        "original searches that divide by the length, or that stop early, give another order",
    )


def _offsets(given: MappedCheckpoint) -> Finding | None:
    """Finds codes that count on from level to level: level * size + code."""
    if given.codes is None:
        return None
    least, most = given.codes.min(0), given.codes.max(0)
    if given.codes.shape[1] < 2 or not (least[1:] > most[:-1]).all():
        return None
    spans = ", ".join(f"{a} to {b}" for a, b in zip(least.tolist(), most.tolist(), strict=True))
    return Finding(
        "offsets",
        "warn",
        f"the codes of the levels are {spans}: each level counts on after the one before. That is "
        "right if the tokens are spelled with these numbers; else subtract the first of each level",
    )


def _compare_masks(given: MappedCheckpoint) -> Finding | None:
    """Compares what the original's mask allows with the ids that there are."""
    ids = len(set(given.ids))
    if given.chosen.original_mask == "trie":
        return None
    if given.chosen.original_mask == "none":
        allowed = "any tokens"
    else:
        counts = [len(set(level)) for level in zip(*given.ids, strict=False)]
        allowed = f"each used code of a level after any other, {math.prod(counts):,} ids"
    return Finding(
        "mask",
        "warn",
        f"the original allows {allowed}; {ids:,} ids belong to items. Others take places in its "
        "slates, so its figures are not those of slates of items. Here slates hold items alone",
    )


def _first_level(given: MappedCheckpoint) -> Finding | None:
    used, beams = len({one[0] for one in given.ids}), given.chosen.original_beams
    if given.chosen.original_mask != "trie" or used >= 2 * beams or beams == 1:
        return None
    return Finding(
        "first level",
        "warn",
        f"{used} codes of level 1 are in use, and {beams} beams ask for {2 * beams} candidates: "
        "forbidden ones fill the original's beams until level 2. Here a beam is always a valid one",
    )


def _prompt(given: MappedCheckpoint) -> Finding:
    most, positions = given.max_history, given.config.decoder.max_positions
    rows = np.resize(np.arange(len(given.item_ids)), most).tolist()
    length = len(given.prompt(rows)) + given.longest + len(given.end_tokens())
    text = "".join(given.chosen.prompt([given.parts[row] for row in rows[:2]]))
    detail = (
        f"the last {most} items of a history, oldest first, make {length} tokens with an id. With "
        f"two items a prompt ends {text[-160:]!r}"
    )
    if length > positions:
        return Finding(
            "prompt",
            "fail",
            f"{detail}; the model has {positions} positions, so choose a smaller --max-history",
        )
    own = given.chosen.max_history
    if most != own and given.chosen.published:
        detail += f"; the format itself takes {own} items, so scores are not its scores"
        return Finding("prompt", "warn", detail)
    return Finding("prompt", "ok", detail)


def _rule(given: MappedCheckpoint) -> Finding:
    over = {
        "vocabulary": f"all {given.config.vocab_size:,} tokens, valid or not",
        "level": "all codes of the level, valid or not",
        "children": "the codes that continue the id of an item",
    }
    ends = given.end_tokens()
    names = " and ".join(repr(given.tokenizer.tokenizer.decode([t], False)) for t in ends)
    also = f" After the codes come {names} (tokens {list(ends)}), scored too." if ends else ""
    own = given.chosen.rule
    other = (
        "" if given.rule == own else f" The original's rule is {own}; scores are not its scores."
    )
    return Finding(
        "rule",
        "ok" if given.rule == own else "warn",
        f"{given.rule}: the softmax of a code runs over {over[given.rule]}.{also}{other} The rule "
        "changes scores and order, and the bundle stores it",
    )


def _divisor(given: MappedCheckpoint) -> Finding | None:
    penalty = given.chosen.length_penalty
    if not penalty:
        return None
    count = given.longest + len(given.end_tokens())
    return Finding(
        "divisor",
        "ok",
        f"the original divides a score by the number of its tokens to the power of {penalty:g}, "
        f"here up to {count}. Older versions of transformers divide by other numbers, so compare "
        "orders",
    )


def _memory(given: MappedCheckpoint) -> Finding | None:
    """LETTER's test catches an end of memory, and goes on with one beam less."""
    if not given.chosen.lowers_beams:
        return None
    sizes, beams = given.config.decoder, given.chosen.original_beams
    rows = np.resize(np.arange(len(given.item_ids)), given.max_history).tolist()
    tokens = len(given.prompt(rows)) + given.longest
    cache = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * given.value_bytes
    size = cache * tokens * beams / GIB
    return Finding(
        "beams",
        "warn",
        f"{beams} beams of {tokens} tokens need {size:.2g} GiB of keys and values for each user of "
        "a batch. LETTER's test lowers the number of beams by one each time memory ends, and its "
        "figures do not say so: ask with how many a figure was measured",
    )


def published_figure(chosen: CheckpointFormat | None) -> Finding:
    """Asks which column a published figure belongs to."""
    columns = [
        "how many beams, and the K of the metric",
        "valid items alone, or all places of the beams",
        "hits of items, or of ids that several items share",
        "with or without items of the history",
        "validation or test, and which prompt",
        "which rule, and whether beams were drawn",
    ]
    own = "" if chosen is None or not chosen.published else f" {chosen.name}: {chosen.published}"
    return Finding(
        "published figure",
        "ask",
        f"which column does a figure belong to that you compare with? Ask: {'; '.join(columns)}."
        f"{own} `recserve evaluate` counts hits of items, with and without items of the history",
    )
