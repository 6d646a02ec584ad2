"""What a format of checkpoints must say, and the options of an import.

A format is one class in one file, and one line in `registry.py` or an entry point of the group
`recserve.formats`. It says how ids are spelled, which items have which, and what a prompt is.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from recserve.core.plugins import Pluggable
from recserve.features.tables.items import ItemTable
from recserve.models.config import MAX_CODES, MAX_HISTORY
from recserve.models.imported_model import MAX_LEVELS
from recserve.models.scoring import Rule
from recserve.tokenizer.tokenizer import TextTokenizer

SharedIds = Literal["popular", "first", "all"]
NUMBER = r"(0|[1-9][0-9]{0,5})"


class ImportFault(ValueError):
    """A folder or a file cannot be imported; the message names it and what to do."""


@dataclass(frozen=True)
class ImportOptions:
    """Options of `recserve bundle import`.

    Attributes:
        folder: Folder of the checkpoint in the Hugging Face layout.
        items: File of items: Parquet, CSV or JSON lines; or a folder with the parts of one.
        out: Folder of the new bundle.
        format: Name of the format. None: `generic`, if `id_format` and `prompt` are given.
        ids: File with the id of each item.
        id_format: Spelling of an id, such as `<a_{}><b_{}>` or `[{text}]`, for `generic`.
        item_text: Text of an item in a prompt, such as `{id} {title}`, for `generic`.
        prompt: Jinja file of the prompt, for `generic`.
        events: File of events, for histories, popularity and evaluation.
        shared_ids: Which of several items with one id are recommended.
        max_history: Most items of a history in a prompt. None: what the format says.
        rule: What the softmax of a level runs over. None: what the format says.
        only_rule: Whether the head keeps the tokens of this rule alone, so that no request can ask
            for `vocabulary`.
        columns: Names of columns in the files by our name.
    """

    folder: Path
    items: Path
    out: Path
    format: str | None = None
    ids: Path | None = None
    id_format: str | None = None
    prompt: Path | None = None
    item_text: str | None = None
    events: Path | None = None
    shared_ids: SharedIds = "popular"
    max_history: int | None = None
    rule: Rule | None = None
    only_rule: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_history is not None and not 1 <= self.max_history <= MAX_HISTORY:
            raise ValueError(f"max_history is {self.max_history}; expected 1..{MAX_HISTORY}")


def check_unicode(text: str, place: object) -> str:
    """Returns the text. Raises ImportFault if it holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ImportFault(
            f"{place}: character {error.start} is half of a surrogate pair; expected text that "
            "UTF-8 can hold"
        ) from None
    return text


class IdSpelling:
    """How the codes of an id are spelled, such as `<a_{}><b_{}><c_{}>`: one token per code.

    Attributes:
        text: The spelling.
        pieces: Text before the number of each level; `ending` follows the number.
        ending: Text after each number.
    """

    def __init__(self, text: str) -> None:
        """Parses a spelling.

        Raises:
            ImportFault: If it has no `{}`, or its parts do not end alike.
        """
        *starts, ending = text.split("{}")
        fits = 1 <= len(starts) <= MAX_LEVELS and "{" not in text.replace("{}", "")
        fits = fits and all(start.startswith(ending) for start in starts[1:])
        if not fits:
            raise ImportFault(
                f"id format {text[:80]!r}: expected 1 to {MAX_LEVELS} parts with one {{}} each, "
                "that end alike, such as <a_{}><b_{}><c_{}>"
            )
        self.text, self.ending = text, ending
        self.pieces = (starts[0], *(start[len(ending) :] for start in starts[1:]))

    @property
    def num_levels(self) -> int:
        """L."""
        return len(self.pieces)

    def spell_code(self, level: int, code: int) -> str:
        """Returns the token of a code."""
        return f"{self.pieces[level]}{code}{self.ending}"

    def spell(self, codes: Sequence[int]) -> str:
        """Returns the text of an id."""
        return "".join(self.spell_code(level, code) for level, code in enumerate(codes))

    def pattern(self, level: int) -> str:
        """Returns a regular expression of the tokens of a level, whose group 1 is the code."""
        return re.escape(self.pieces[level]) + NUMBER + re.escape(self.ending)

    def read(self, value: Any) -> list[int] | None:
        """Returns the codes of an id; None if it is none.

        Args:
            value: The text of the id, the texts of its codes, the codes, or a text of numbers.
        """
        if isinstance(value, str):
            whole = "".join(self.pattern(level) for level in range(self.num_levels))
            found = re.fullmatch(whole, value.strip())
            numbers = re.fullmatch(r"[\[(]?\s*\d+(?:[\s,]+\d+)*\s*[\])]?", value, re.ASCII)
            value = found.groups() if found else re.findall(r"\d+", value) if numbers else ()
            value = [int(one) for one in value]
        if not isinstance(value, list | tuple | np.ndarray) or len(value) != self.num_levels:
            return None
        codes = [self._code(level, one) for level, one in enumerate(value)]
        return None if any(not 0 <= code < MAX_CODES for code in codes) else codes

    def _code(self, level: int, value: Any) -> int:
        """Returns a code; -1 if the value is none."""
        if isinstance(value, str):
            found = re.fullmatch(self.pattern(level), value)
            return int(found[1]) if found else -1
        integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        return int(value) if integer else -1


class CheckpointFormat(Pluggable, ABC):
    """A kind of folders that can be imported.

    Attributes:
        name: Name in `--format`.
        rule: The scoring rule of the original.
        length_penalty: Power of the number of scored tokens that divides the original's scores.
        max_history: Most items in a prompt if nothing names another number.
        original_mask: What the original's own search lets follow a token: a `trie` of ids, the used
            codes of each level (`levels`), or `none`.
        original_beams: Beams of its own evaluation.
        lowers_beams: Whether that asks for fewer beams once memory ends.
        published: What its published figures are of.
        spelling: How an id is spelled. Set by `read_ids` at the latest. Ids that are texts have
            none.
    """

    rule: ClassVar[Rule] = "children"
    length_penalty: ClassVar[float] = 0.0
    max_history: int = 50
    original_mask: ClassVar[Literal["trie", "levels", "none"]] = "trie"
    original_beams: ClassVar[int] = 1
    lowers_beams: ClassVar[bool] = False
    published: ClassVar[str] = ""
    spelling: IdSpelling

    def __init__(self, options: ImportOptions) -> None:
        """Raises ImportFault if an option is missing, or has no effect for this format."""
        self.options = options

    def need_ids(self, what: str) -> Path:
        """Returns `--ids` of a format that has a spelling and a prompt of its own.

        Args:
            what: What `--ids` is.

        Raises:
            ImportFault: If it is missing, or `--id-format` or `--prompt` is given.
        """
        options = self.options
        for flag, value in (
            ("--id-format", options.id_format),
            ("--prompt", options.prompt),
            ("--item-text", options.item_text),
        ):
            if value is not None:
                raise ImportFault(
                    f"{flag} has no effect with format {self.name}, which has its own"
                )
        if options.ids is None:
            raise ImportFault(f"format {self.name} needs --ids, {what}")
        return options.ids

    def read_texts(self, item_ids: Sequence[str]) -> list[str] | None:
        """Returns the text of each item's id, if ids may have any number of tokens.

        None: they have a token for each code, and `read_ids` is asked. Raises ImportFault.
        """
        return None

    def item_texts(self, items: ItemTable, ids: Sequence[str]) -> list[str] | None:
        """Returns the text of each item in a prompt; None if it is the id, whose codes are tokens.

        Args:
            items: The items.
            ids: [I] texts of their ids.

        Raises:
            ImportFault: If an item lacks what its text needs.
        """
        return None

    @abstractmethod
    def read_ids(self, item_ids: Sequence[str]) -> np.ndarray:
        """Returns the codes [I, L] int64 of the items. Raises ImportFault."""

    def priority(self, item_ids: Sequence[str]) -> np.ndarray | None:
        """Returns [I] float32 which of several items with one id is `popular`, the largest first.

        None: the number of events.
        """
        return None

    def open_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Takes what the format needs of the folder's tokeniser. Raises ImportFault."""

    @abstractmethod
    def prompt(self, history: Sequence[str]) -> Sequence[str]:
        """Returns the texts of a prompt, which are tokenised separately.

        Args:
            history: [n] texts of the ids or of the items, oldest first.

        Raises:
            ImportFault: If there is no prompt of so many items.
        """

    def encode(self, tokenizer: TextTokenizer, texts: Sequence[str]) -> list[int]:
        """Returns the tokens of a prompt. The first text has the tokens that the model expects."""
        tokens: list[int] = []
        for number, text in enumerate(texts):
            tokens += tokenizer.encode(text, special=not number)
        return tokens

    def ending_tokens(self, tokenizer: TextTokenizer) -> tuple[int, ...]:
        """Returns the tokens after an id that the original scores under the rule `vocabulary`.

        Raises:
            ImportFault: If this checkpoint has none. It is imported with another rule then.
        """
        return ()
