"""Chat templates: messages to a prompt, as the model's folder says, in a sandbox.

A template is a program that came with the weights. It runs in jinja2's immutable sandbox, sees only
the messages and names below, and what it writes is bounded.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PROMPT_CHARACTERS = 8 << 20


class TemplateError(ValueError):
    """A template is damaged, or refuses these messages; the words are for the client."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled template. special: `bos_token`, `eos_token` and the like, for the template."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises TemplateError where the source does not parse."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not parse: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        answer_follows: bool = True,
    ) -> str:
        """The prompt. settings: further names for the template, such as `enable_thinking`.

        answer_follows: end with the beginning of the assistant's turn.
        Raises TemplateError where the template refuses, fails, or writes too much.
        """
        names = {
            **(settings or {}),
            **self._special,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": answer_follows,
        }
        pieces, size = [], 0
        try:
            for piece in self._template.generate(names):
                size += len(piece)
                if size > MAX_PROMPT_CHARACTERS:
                    raise TemplateError(
                        f"the chat template wrote over {MAX_PROMPT_CHARACTERS} characters"
                    )
                pieces.append(piece)
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template cannot be applied: {error}") from None
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ):
            raise TemplateError("the chat template cannot be applied to these messages") from None
        return "".join(pieces)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(f"the chat template refuses this: {str(message)[:200]}")


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
