"""LC-Rec and LETTER-LC-Rec: https://github.com/zhengbw0324/LC-Rec, as of its commit e6f1b3b.

A Llama with tokens `<a_i><b_j>...`, and a map NAME.index.json of such tokens by item number. The
prompt is number 0 of the 17 of its test. Ids that no item has are never found here; the original
allows each token of a level after any other. Its scores are sums divided by the number of scored
tokens, the end token included, as transformers does from version 4.50 on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recserve.formats.checkpoint_format import CheckpointFormat, ImportFault, ImportOptions
from recserve.formats.id_files import read_index
from recserve.tokenizer.tokenizer import TextTokenizer

PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nThe user has interacted with items {history} in "
    "chronological order. Can you predict the next possible item that the user may expect?\n\n"
    "### Response:"
)


class LcRec(CheckpointFormat):
    """Reads the map of a data set, and writes the prompt of the test."""

    name = "lc-rec"
    rule = "vocabulary"
    length_penalty = 1.0
    max_history = 20
    original_mask = "levels"
    original_beams = 20
    lowers_beams = True
    published = (
        "20 beams, the mean over 17 prompts, and invalid ids keep their places unless its test had "
        "--filter_items, which moves them to the end."
    )

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._ids = self.need_ids("the file NAME.index.json of its data")

    def read_ids(self, item_ids: Sequence[str]) -> np.ndarray:
        """Reads NAME.index.json."""
        self.spelling, codes = read_index(self._ids, item_ids)
        return codes

    def prompt(self, history: Sequence[str]) -> Sequence[str]:
        """Returns one text."""
        return (PROMPT.format(history=", ".join(history)),)

    def ending_tokens(self, tokenizer: TextTokenizer) -> tuple[int, ...]:
        """Returns the end token."""
        if not tokenizer.end_tokens:
            raise ImportFault(
                f"{self.options.folder.name} names no end token, which LC-Rec scores; import with "
                "--rule children, which does not"
            )
        return tokenizer.end_tokens[:1]
