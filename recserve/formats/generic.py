"""Any decoder that spells semantic ids with one token per code: ids and prompt are options."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recserve.files import UnreadableFile, read_bytes
from recserve.formats.checkpoint_format import (
    CheckpointFormat,
    IdSpelling,
    ImportFault,
    ImportOptions,
)
from recserve.formats.id_files import read_ids
from recserve.tokenizer.chat_template import ChatTemplate, TemplateTimeout
from recserve.tokenizer.template_sandbox import TemplateError

MAX_TEMPLATE_BYTES = 1 << 20


class Generic(CheckpointFormat):
    """Ids as in `--id-format`, and a Jinja template that writes the prompt of `history`.

    `history` is a list of the ids' texts, oldest first. The template runs in the sandbox of chat
    templates, during the import alone.
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
        self.spelling = IdSpelling(options.id_format)
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

    def prompt(self, history: Sequence[str]) -> Sequence[str]:
        """Returns one text, as the template writes it."""
        try:
            text = self._template.render([], {"history": list(history)}, answer_follows=False)
        except (TemplateError, TemplateTimeout) as error:
            raise ImportFault(
                f"{self.options.prompt}, with {len(history)} items: {_of_prompt(error)}"
            ) from None
        return (text,)


def _of_prompt(error: Exception) -> str:
    return str(error).replace("the chat template", "the template").replace("these messages", "them")
