"""Chat templates: messages to the prompt a model was trained on.

A template is code that came with the weights, so it runs in Jinja's immutable sandbox: no access to
Python's internals, and nothing it is given can be changed. What templates may call beside Jinja's
own follows Hugging Face's renderer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """A template refused the messages, or is itself broken."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def render_chat(
    template: str,
    messages: Seq[Mapping[str, Any]],
    special: Mapping[str, str],
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The prompt of a conversation.

    messages: `{"role", "content"}` each, oldest first. special: bos_token and the like by name.
    variables: whatever else a template reads (tools, documents, its own switches).
    Raises ChatTemplateError with the template's own words where it raises.
    """
    try:
        return _compile(template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            **special,
            **variables,
        )
    except Exception as error:
        raise ChatTemplateError(f"the chat template refused the messages: {error}") from error


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which prompts do not want.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
