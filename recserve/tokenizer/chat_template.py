"""Renders chat messages as a prompt with the model's own template, in a sandbox.

A template is an untrusted program that comes with the weights. It runs in jinja2's immutable
sandbox, reads only the messages and the names below, and writes a bounded number of characters.
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
    """A template is damaged or rejects the messages; the message is shown to the client."""


class _Generation(Extension):
    """Renders the content of `{% generation %}`, which marks assistant text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled chat template."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compiles a template.

        Args:
            source: Jinja source.
            special: Special tokens by name, such as `bos_token`, which the template can use.

        Raises:
            TemplateError: If the source does not parse.
        """
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
        """Returns the prompt of a chat.

        Args:
            messages: Chat messages, oldest first.
            settings: Further variables of the template, such as `enable_thinking`.
            answer_follows: True ends the prompt with the start of the assistant's turn.

        Raises:
            TemplateError: If the template rejects the messages, fails, or writes more than
                MAX_PROMPT_CHARACTERS.
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
    raise TemplateError(f"the chat template rejects the messages: {str(message)[:200]}")


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
