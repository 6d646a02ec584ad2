"""OpenOneRec without thinking: https://github.com/Kuaishou-OneRec/OpenOneRec, as of 1f4a99e.

A Qwen3 with tokens `<s_a_i><s_b_j><s_c_k>`. Videos, products and ads use the same tokens for other
items, so a bundle holds the items of one domain, and has the trie of this domain alone.

- Its data, not its code, hold the messages of a prompt. They are a file here, with `{history}` in
  place of the ids: `<|sid_begin|>` and `<|sid_end|>` around each, and nothing between them.
- The chat template is the folder's. It must switch thinking off: `/no_think` in the last message
  of the user, and an empty thought. `<|sid_begin|>` follows.
- A score is the sum of the log-softmax over all tokens at the three codes.
- Of items that share an id, its evaluation takes the one with the largest `count_after_downsample`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recserve.features.tables.input_table import InputTable
from recserve.features.tables.parquet import SchemaError
from recserve.files import UnreadableFile, parse_json, read_bytes, read_json
from recserve.formats.checkpoint_format import (
    CheckpointFormat,
    IdSpelling,
    ImportFault,
    ImportOptions,
    check_unicode,
)
from recserve.formats.id_files import match_ids
from recserve.tokenizer.chat_template import ChatTemplate, TemplateTimeout
from recserve.tokenizer.template_sandbox import TemplateError
from recserve.tokenizer.tokenizer import TextTokenizer

BEGIN, END = "<|sid_begin|>", "<|sid_end|>"
HISTORY, NO_THINK, NO_THOUGHT = "{history}", "/no_think", "<think>\n\n</think>\n\n"
CODES = 8192
PID, SID = "pid", "sid"
MAX_VIDEOS, MAX_PRODUCTS = 512, 100


class OpenOneRec(CheckpointFormat):
    """Reads the packed map of one domain, and the messages of its evaluation."""

    name = "openonerec"
    rule = "vocabulary"
    original_mask = "none"
    original_beams = 32
    published = (
        "32 beams without thoughts or with one, pass and recall at the first k in order, ties of "
        "counts at random, and recall divided by up to 10 targets."
    )

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        for flag, value in (("--id-format", options.id_format), ("--item-text", options.item_text)):
            if value is not None:
                raise ImportFault(f"{flag} has no effect with format {self.name}")
        if options.ids is None or options.prompt is None:
            raise ImportFault(
                f"format {self.name} needs --ids, a map of one domain such as sid2pid.json or a "
                f"table of {PID} and {SID}, and --prompt, JSON with the messages of its evaluation "
                f"and {HISTORY} in place of the ids"
            )
        self._ids = options.ids
        self.spelling = IdSpelling("<s_a_{}><s_b_{}><s_c_{}>")
        self.max_history = MAX_VIDEOS
        self._messages = read_messages(options.prompt)
        self._template: ChatTemplate | None = None
        self._counts: Mapping[str, float] = {}

    def read_ids(self, item_ids: Sequence[str]) -> np.ndarray:
        """Reads the map."""
        if self._ids.suffix.lower() != ".json":
            return match_ids(self._ids, _pairs(self._ids), item_ids, self.spelling)
        found, self._counts, key = read_packed(self._ids)
        if key == "iid":  # only products have such a map
            self.max_history = MAX_PRODUCTS
        return match_ids(self._ids, found, item_ids, self.spelling)

    def priority(self, item_ids: Sequence[str]) -> np.ndarray | None:
        """Returns the downsampled counts of the items, if the map has them."""
        if not self._counts:
            return None
        return np.array([self._counts[item_id] for item_id in item_ids], np.float32)

    def prompt(self, history: Sequence[str]) -> Sequence[str]:
        """Returns the messages as the folder's template writes them, and the begin of an id."""
        ids = "".join(f"{BEGIN}{one}{END}" for one in history)
        messages = [{**m, "content": m["content"].replace(HISTORY, ids)} for m in self._messages]
        return (self._render(messages) + BEGIN,)

    def encode(self, tokenizer: TextTokenizer, texts: Sequence[str]) -> list[int]:
        """Returns the tokens of a prompt, whose template writes all special ones."""
        return tokenizer.encode("".join(texts), special=False)

    def open_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Takes the chat template. Raises ImportFault if it does not switch thoughts off."""
        folder = self.options.folder.name
        self._template = tokenizer.template
        if self._template is None:
            raise ImportFault(
                f"{folder} has no chat template; copy qwen3_soft_switch.jinja2 of OpenOneRec into "
                "it as chat_template.jinja"
            )
        text = self._render(self._messages)
        asked = [m["content"] for m in self._messages if m["role"] == "user"][-1]
        switched = NO_THINK in text.rpartition(asked)[2]
        if not switched or not text.endswith(NO_THOUGHT):
            raise ImportFault(
                f"{folder}: its chat template writes {text[-60:]!r} at the end of a prompt; "
                f"OpenOneRec's adds {NO_THINK} to the last message and ends with an empty thought. "
                "Copy its qwen3_soft_switch.jinja2 into the folder as chat_template.jinja"
            )

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        assert self._template is not None
        try:
            text = self._template.render(messages, {"enable_thinking": False})
        except (TemplateError, TemplateTimeout) as error:
            raise ImportFault(f"{self.options.folder.name}: {error}") from None
        return check_unicode(text, f"{self.options.folder.name}: a prompt")


def read_messages(path: Path) -> list[dict[str, str]]:
    """Returns the messages of a file, with texts as contents.

    OpenOneRec's data have lists of parts, which its own template drops without a word. They become
    texts here.

    Raises:
        ImportFault: If the file holds no such messages.
    """
    try:
        content = read_json(path)
    except UnreadableFile as error:
        raise ImportFault(str(error)) from error
    if isinstance(content, dict):
        content = content.get("messages")
    if not isinstance(content, list) or not content:
        raise ImportFault(f'{path}: expected messages, such as [{{"role": "user", "content": …}}]')
    messages = [_message(path, number, one) for number, one in enumerate(content)]
    holders = [m for m in messages if HISTORY in m["content"]]
    roles = [m["role"] for m in messages]
    if len(holders) != 1 or holders[0]["content"].count(HISTORY) != 1 or roles[-1] != "user":
        raise ImportFault(
            f"{path}: the messages hold {HISTORY} in {len(holders)} places and end with role "
            f"{roles[-1]!r}; expected it once, in place of the ids, and the user last"
        )
    return messages


def _message(path: Path, number: int, one: Any) -> dict[str, str]:
    role = one.get("role") if isinstance(one, dict) else None
    content = one.get("content") if isinstance(one, dict) else None
    if isinstance(content, list):
        texts = [p.get("text") if isinstance(p, dict) else p for p in content]
        kinds = [p.get("type", "text") if isinstance(p, dict) else "text" for p in content]
        other = [kind for kind in kinds if kind != "text"]
        if other:
            raise ImportFault(
                f"{path}: message {number} has a part of type {str(other[0])[:80]!r}; expected "
                "texts"
            )
        strings = [text for text in texts if isinstance(text, str)]
        content = "".join(strings) if len(strings) == len(texts) else None
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise ImportFault(
            f"{path}: message {number} is {str(one)[:80]!r}; expected role system, user or "
            "assistant and a content that is a text or a list of texts"
        )
    return {"role": role, "content": check_unicode(content, f"{path}: message {number}")}


def read_packed(path: Path) -> tuple[dict[str, list[int]], dict[str, float], str]:
    """Returns codes and downsampled counts by item id, and the name of the item's field.

    The keys are `a * 8192**2 + b * 8192 + c`, and the values lists of items.

    Raises:
        ImportFault: If the file is no such map.
    """
    try:
        content = parse_json(read_bytes(path), path, unique=True)
    except UnreadableFile as error:
        raise ImportFault(str(error)) from error
    codes: dict[str, list[int]] = {}
    counts: dict[str, float] = {}
    name = PID
    for key, items in content.items() if isinstance(content, dict) else [("", None)]:
        packed = int(key) if str(key).isascii() and str(key).isdigit() else -1
        if not 0 <= packed < CODES**3 or not isinstance(items, list):
            raise ImportFault(
                f"{path}: {str(key)[:40]!r} is no packed id with its items; expected a key below "
                f"{CODES}**3 and a list, such as "
                '{"549890": [{"pid": 7, "count": 3, "count_after_downsample": 2}]}'
            )
        for item in items:
            value = item.get("pid", item.get("iid")) if isinstance(item, dict) else None
            count = item.get("count_after_downsample", 0) if isinstance(item, dict) else 0
            if not isinstance(value, int | str) or not isinstance(count, int | float):
                raise ImportFault(
                    f"{path}: key {key} has the item {str(item)[:80]!r}; expected pid or iid, and "
                    "counts"
                )
            name = "iid" if "iid" in item else PID
            if str(value) in codes:
                raise ImportFault(
                    f"{path}: item {str(value)[:80]!r} has two ids; take the map of one domain"
                )
            codes[str(value)] = [packed // CODES**2, packed // CODES % CODES, packed % CODES]
            counts[str(value)] = float(count)
    return codes, counts, name


def _pairs(path: Path) -> dict[str, Any]:
    """Returns the ids of a table with the columns `pid` and `sid`."""
    try:
        table = InputTable(path, (PID, SID)).table
    except (UnreadableFile, SchemaError) as error:
        raise ImportFault(str(error)) from error
    lacking = [name for name in (PID, SID) if name not in table.column_names]
    if lacking:
        raise ImportFault(f"{path} has no column {lacking[0]}; expected {PID} and {SID}")
    names = [str(value) for value in table.column(PID).to_pylist()]
    values = table.column(SID).to_pylist()
    found = dict(zip(names, values, strict=True))
    if len(found) < len(names):
        raise ImportFault(f"{path}: an item occurs twice; an item has one id")
    return found
