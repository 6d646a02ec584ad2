"""Any decoder that spells semantic ids with one token per code: ids and prompt are options."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from recserve.features.tables.items import ItemTable
from recserve.files import UnreadableFile, read_bytes
from recserve.formats.checkpoint_format import (
    CheckpointFormat,
    IdSpelling,
    ImportFault,
    ImportOptions,
    check_unicode,
)
from recserve.formats.id_files import read_ids, read_texts
from recserve.tokenizer.chat_template import ChatTemplate, TemplateTimeout
from recserve.tokenizer.template_sandbox import TemplateError

MAX_TEMPLATE_BYTES = 1 << 20
TEXT = "{text}"
FIELDS = ("id", "title", "item_id")


class Generic(CheckpointFormat):
    """Ids as in `--id-format`, and a Jinja template that writes the prompt of `history`.

    `history` is a list of the ids' texts, or of the items' as in `--item-text`, oldest first. The
    template runs in the sandbox of chat templates, during the import alone.
    """

    name = "generic"
    max_history = 20

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        for flag, value in (
            ("--id-format", options.id_format),
            ("--prompt", options.prompt),
            ("--ids", options.ids),
        ):
            if value is None:
                raise ImportFault(f"format generic needs {flag}")
        assert options.id_format is not None and options.prompt is not None
        self._around = options.id_format.split(TEXT)
        self.ids_are_texts = len(self._around) > 1
        if not self.ids_are_texts:
            self.spelling = IdSpelling(options.id_format)
        elif len(self._around) > 2 or "{" in "".join(self._around):
            raise ImportFault(
                f"id format {options.id_format[:80]!r}: expected one {TEXT}, such as [{TEXT}]"
            )
        self._item_text = options.item_text
        if self._item_text is not None:
            fields = re.findall(r"\{(.*?)\}", self._item_text)
            other = [name for name in fields if name not in FIELDS]
            if other or not fields:
                raise ImportFault(
                    f"item text {self._item_text[:80]!r}: expected fields of "
                    f"{', '.join(f'{{{name}}}' for name in FIELDS)}, got {other or 'none'}"
                )
        try:
            source = read_bytes(options.prompt, MAX_TEMPLATE_BYTES).decode("utf-8")
            self._template = ChatTemplate(source, {})
        except UnicodeDecodeError:
            raise ImportFault(f"{options.prompt} is not UTF-8") from None
        except (UnreadableFile, TemplateError) as error:
            raise ImportFault(f"{options.prompt}: {_of_prompt(error)}") from None

    def read_ids(self, item_ids: Sequence[str]) -> np.ndarray:
        """Reads `--ids`."""
        assert self.options.ids is not None
        return read_ids(self.options.ids, item_ids, self.spelling)

    def read_texts(self, item_ids: Sequence[str]) -> list[str] | None:
        """Reads `--ids` as texts, if `--id-format` says so."""
        if not self.ids_are_texts:
            return None
        assert self.options.ids is not None
        before, after = self._around
        return [f"{before}{text}{after}" for text in read_texts(self.options.ids, item_ids)]

    def item_texts(self, items: ItemTable, ids: Sequence[str]) -> list[str] | None:
        """Writes `--item-text`; the id alone, if ids are texts and there is none."""
        if self._item_text is None:
            return list(ids) if self.ids_are_texts else None
        texts: list[str] = []
        for row, own in enumerate(ids):
            values = {"id": own, "title": items.titles[row], "item_id": items.ids[row]}
            if "{title}" in self._item_text and not values["title"]:
                raise ImportFault(
                    f"item {items.ids[row][:80]!r} has no title, which --item-text needs"
                )
            pieces = re.split(r"\{(.*?)\}", self._item_text)
            texts.append("".join(values[p] if n % 2 else p for n, p in enumerate(pieces)))
        return texts

    def prompt(self, history: Sequence[str]) -> Sequence[str]:
        """Returns one text, as the template writes it."""
        try:
            text = self._template.render([], {"history": list(history)}, answer_follows=False)
        except (TemplateError, TemplateTimeout) as error:
            raise ImportFault(
                f"{self.options.prompt}, with {len(history)} items: {_of_prompt(error)}"
            ) from None
        return (check_unicode(text, f"{self.options.prompt}, with {len(history)} items"),)


def _of_prompt(error: Exception) -> str:
    return str(error).replace("the chat template", "the template").replace("these messages", "them")
