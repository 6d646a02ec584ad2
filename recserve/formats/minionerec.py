"""MiniOneRec: https://github.com/AkaliKong/MiniOneRec, as of its commits 81b4ba9 and 0606902.

A Qwen or Llama with tokens `<a_i><b_j><c_k>`, and a map NAME.index.json of such tokens by item
number. Prompt and scores are those of its evaluate.py without a CTR head:

- The two parts of a prompt are tokenised separately. Only a model with a begin token has one.
- A score is the sum of the log-softmax over all tokens at the codes, a newline and the end token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from recserve.files import UnreadableFile, read_bytes
from recserve.formats.checkpoint_format import (
    CheckpointFormat,
    ImportFault,
    ImportOptions,
)
from recserve.formats.id_files import read_index
from recserve.tokenizer.tokenizer import TextTokenizer

TASK = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request. \n\n### Instruction:\n"
    "Can you predict the next possible item that the user may expect?\n\n"
)
QUESTION = (
    "### User Input: \nCan you predict the next possible item the user may expect, given the "
    "following chronological interaction history: {history}\n\n### Response:\n"
)


class MiniOneRec(CheckpointFormat):
    """Reads the map of a MiniOneRec data set, and writes the prompt of its evaluation."""

    name = "minionerec"
    rule = "vocabulary"
    original_beams = 50
    published = (
        "50 beams, hits at 1, 3, 5, 10, 20 and 50 by the text of an id, items of the history stay, "
        "and CC counts invalid places."
    )

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._ids = self.need_ids("the file NAME.index.json or info/NAME.txt of its data")

    def read_ids(self, item_ids: Sequence[str]) -> np.ndarray:
        """Reads NAME.index.json, or the lines `id, title, item number` of info/NAME.txt."""
        lines = None if self._ids.suffix == ".json" else self._lines()
        self.spelling, codes = read_index(self._ids, item_ids, lines)
        return codes

    def _lines(self) -> dict[str, str]:
        try:
            lines = read_bytes(self._ids).decode("utf-8").splitlines()
        except UnreadableFile as error:
            raise ImportFault(str(error)) from error
        except UnicodeDecodeError:
            raise ImportFault(f"{self._ids} is not UTF-8") from None
        parts = [line.split("\t") for line in lines]
        for number, part in enumerate(parts, 1):
            if len(part) < 3:
                raise ImportFault(
                    f"{self._ids}: line {number} has {len(part)} columns; expected id, title and "
                    "item number, separated by tabs"
                )
        found = {part[-1].strip(): part[0] for part in parts}
        if len(found) < len(parts):
            names = Counter(part[-1].strip() for part in parts)
            twice = names.most_common(1)[0][0]
            raise ImportFault(f"{self._ids}: item {twice[:80]!r} occurs twice; an item has one id")
        return found

    def prompt(self, history: Sequence[str]) -> Sequence[str]:
        """Returns the task and the question."""
        return TASK, QUESTION.format(history=", ".join(history))

    def encode(self, tokenizer: TextTokenizer, texts: Sequence[str]) -> list[int]:
        """Returns the tokens of the parts, after the begin token of a model that has one."""
        begin = tokenizer.tokenizer.token_to_id(tokenizer.special.get("bos_token", ""))
        tokens = [] if begin is None else [begin]
        for text in texts:
            tokens += tokenizer.encode(text, special=False)
        return tokens

    def ending_tokens(self, tokenizer: TextTokenizer) -> tuple[int, ...]:
        """Returns newline and end token."""
        newline = tokenizer.encode("\n", special=False)
        if len(newline) != 1 or not tokenizer.end_tokens:
            raise ImportFault(
                f"{self.options.folder.name}: a newline is {len(newline)} tokens and the end "
                f"tokens are {tokenizer.end_tokens}; MiniOneRec scores one of each. Import with "
                "--rule children, which scores neither"
            )
        return newline[0], tokenizer.end_tokens[0]
