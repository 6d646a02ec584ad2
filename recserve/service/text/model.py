"""A served language model as the text routes see it: its name, its tokeniser, its limits."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from recserve.service.errors import UnknownModel
from recserve.speculation.drafter import Drafter
from recserve.speculation.verifiers.registry import verifiers
from recserve.tokenizer.tokenizer import TextTokenizer


class TextEngine(Protocol):
    """What is asked of the engine; `engine.Engine` is one."""

    def submit(self, request: Any) -> Future[Any]:
        """Queue a TextQuery or TextScoreQuery; the future gets its Completion, its Scores or
        the error.
        """
        ...


@dataclass(frozen=True)
class TextModel:
    """name: what `model` must say. vocab_size: tokens the model scores, which may be more than the
    tokeniser has. end_tokens: those that end a text. context: most tokens of prompt and text
    together. drafters: what the engine has; default_drafter: of requests that name none.
    """

    name: str
    tokenizer: TextTokenizer
    vocab_size: int
    end_tokens: tuple[int, ...]
    context: int
    parameters: int
    device: torch.device
    drafters: Mapping[str, Drafter]
    default_drafter: str = "none"
    default_verifier: str = "sample"

    def check_name(self, name: str | None) -> None:
        """Raises UnknownModel where a request names another model."""
        if name and name != self.name:
            raise UnknownModel(f"the language model here is {self.name!r}, got {name[:80]!r}")

    def described(self) -> dict[str, Any]:
        """What GET /v1/models says of it beside its name."""
        return {
            "parameters": self.parameters,
            "drafters": list(self.drafters),
            "verifiers": list(verifiers()),
            "chat": self.tokenizer.template is not None,
        }
