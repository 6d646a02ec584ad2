"""A served language model as the text routes use it: name, tokeniser and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch

from recserve.core.client import Client
from recserve.core.constraint import Choices, Constraint, Grammar
from recserve.extras import describe_missing
from recserve.schemas.items import UnsupportedField
from recserve.service.errors import ContextExceeded, UnknownModel
from recserve.speculation.drafter import Drafter
from recserve.speculation.verifiers.registry import verifiers
from recserve.tokenizer.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from recserve.service.text.constraints.compiler import ConstraintCompiler


class TextEngine(Protocol):
    """The part of the engine that the text service needs; `engine.Engine` implements it."""

    def submit_all(self, requests: Sequence[Any], client: Client) -> list[Future[Any]]:
        """Queues a TextQuery, TextScoreQuery or PromptQuery for each part of a body, all or none.

        Returns:
            Futures of their Completion, Scores or PromptScores.
        """
        ...


@dataclass(frozen=True)
class TextModel:
    """A served language model.

    Attributes:
        name: Name that requests use.
        tokenizer: Its tokeniser.
        vocab_size: Number of tokens that the model scores; may exceed the tokeniser's.
        end_tokens: Tokens that end a text.
        context: Most tokens of prompt and text together.
        parameters: Number of parameters.
        device: Device of the weights.
        drafters: Drafters of the engine by name.
        default_drafter: Drafter of requests that name none.
        default_verifier: Acceptance rule of requests that name none.
        example_prompt: A prompt that suits the model; None if its folder names none.
        aliases: Further names that requests may use.
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
    example_prompt: str | None = None
    aliases: tuple[str, ...] = ()

    def check_name(self, name: str | None) -> None:
        """Raises UnknownModel if a request names another model."""
        if name and name != self.name and name not in self.aliases:
            raise UnknownModel(f"expected the language model {self.name!r}, got {name[:80]!r}")

    def constrain(
        self,
        param: str,
        wanted: Grammar | Choices | None,
        allowed: Sequence[int] | None = None,
        cached: bool = False,
    ) -> Constraint:
        """Compiles the constraint of a request; arguments and errors as `ConstraintCompiler`.

        Raises:
            UnsupportedField: If the library of grammars is not installed.
        """
        try:
            return self._constraints.compile(param, wanted, allowed, cached)
        except ModuleNotFoundError as error:
            missing = describe_missing(error, "a constrained text")
            if missing is None:
                raise
            raise UnsupportedField(param, missing) from None

    @cached_property
    def _constraints(self) -> ConstraintCompiler:
        # Imported here, so that a server without constrained texts never does.
        from recserve.service.text.constraints.compiler import ConstraintCompiler

        return ConstraintCompiler(self.tokenizer, self.vocab_size, self.end_tokens)

    def exceeded(self, param: str, taken: str) -> ContextExceeded:
        """Returns the error of a request that does not fit the context.

        litellm recognises it by the first clause, and LangChain by the code at the end.

        Args:
            param: Field that is too long.
            taken: What the request takes, such as "prompt takes 600".
        """
        return ContextExceeded(
            param,
            f"This model's maximum context length is {self.context} tokens. However, {taken}. "
            "Please reduce the length of the input prompt or of the text to write "
            "(context_length_exceeded)",
        )

    def too_long(self, param: str, tokens: str) -> ContextExceeded:
        """Returns the error of a text of `tokens` tokens that does not fit the context alone.

        Clients of SGLang and llama.cpp recognise its words too.
        """
        return self.exceeded(
            param,
            f"this text of {tokens} tokens is too large: it is longer than the model's context "
            "length",
        )

    def list_entries(self) -> list[dict[str, Any]]:
        """Returns the model in OpenAI's form under each of its names, its own name first.

        This server's own fields are under `recserve`.
        """
        common = {"max_model_len": self.context, "recserve": self.describe()}
        return [
            {
                **{"id": name, "object": "model", "created": 0, "owned_by": "recserve"},
                **{"root": self.name, "parent": None, **common},
            }
            for name in (self.name, *self.aliases)
        ]

    def describe(self) -> dict[str, Any]:
        """Returns this server's own fields of the model in GET /v1/models."""
        return {
            "parameters": self.parameters,
            "drafters": list(self.drafters),
            "verifiers": list(verifiers()),
            "chat": self.tokenizer.template is not None,
            "default_drafter": self.default_drafter,
            "example_prompt": self.example_prompt,
        }
