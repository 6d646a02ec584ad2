"""Renders a chat template in jinja2's immutable sandbox. It runs in a process of its own.

A template is an untrusted program that comes with the weights. It reads only the messages and the
names below, and writes a bounded number of characters. `main` bounds its time and its memory too.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BYTES = 1 << 30  # address space of the process


class TemplateError(ValueError):
    """A template is damaged or rejects the messages; the message is shown to the client."""


class _Generation(Extension):
    """Renders the content of `{% generation %}`, which marks assistant text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class SandboxedTemplate:
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
        except (MemoryError, RecursionError, OverflowError):
            raise TemplateError("the chat template needs too much memory") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        answer_follows: bool,
        most_characters: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt of a chat; the arguments are those of `ChatTemplate.render`.

        Raises:
            TemplateError: If the template rejects the messages, fails, or writes more than
                `most_characters`.
        """
        names = {
            **settings,
            **self._special,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": answer_follows,
        }
        pieces, size = [], 0
        try:
            for piece in self._template.generate(names):
                size += len(piece)
                if size > most_characters:
                    raise TemplateError(
                        f"the chat template wrote over {most_characters} characters"
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
            MemoryError,
        ):
            raise TemplateError("the chat template cannot be applied to these messages") from None
        return "".join(pieces)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes a value as JSON, with the parameters of transformers' filter in its order."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(f"the chat template rejects the messages: {str(message)[:200]}")


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compile(source: str, special: str) -> SandboxedTemplate:
    return SandboxedTemplate(source, json.loads(special))


def _render(request: dict[str, Any]) -> dict[str, str]:
    """Returns `text`, or the `error` that the client is shown. No messages: it only compiles."""
    try:
        template = _compile(request["source"], json.dumps(request["special"]))
        if request["messages"] is None:
            return {"text": ""}
        text = template.render(
            messages=request["messages"],
            settings=request["settings"],
            answer_follows=request["answer_follows"],
            most_characters=request["most_characters"],
            tools=request["tools"],
        )
        return {"text": text}
    except TemplateError as error:
        return {"error": str(error)}


def main() -> None:
    """Answers requests, one JSON object per line, until the input ends.

    A template that computes for longer than `most_s` ends the process by a signal, even in the
    middle of a long operation. More memory than MAX_BYTES is refused by the system.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which drains first
    sys.stdout.write(" ")  # it is ready
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["most_s"])
        answer = _render(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
