"""The public interface as lines of text, one line per name or option that users rely on.

`python -m tests.support.public_api > tests/repository/public_api.txt` rewrites the snapshot.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click
import typer

import recserve
from recserve.cli.app import app as commands
from recserve.config import ServerConfig
from recserve.server.app import create_app


def python_names() -> Iterator[str]:
    """Yields public classes and functions, with the parameters of their public methods."""
    for name in recserve.__all__:
        value = getattr(recserve, name)
        if not callable(value):
            yield f"python {name}"
            continue
        yield f"python {name}({_parameters(value)})"
        if inspect.isclass(value):
            for method, _ in inspect.getmembers(value):
                if not method.startswith("_"):
                    yield f"python {name}.{_member(value, method)}"


def command_options(command: click.Command | None = None, path: str = "recserve") -> Iterator[str]:
    """Yields every command of the command line with its options."""
    command = typer.main.get_command(commands) if command is None else command
    subcommands: dict[str, click.Command] = getattr(command, "commands", {})
    if subcommands:
        for name, sub in sorted(subcommands.items()):
            yield from command_options(sub, f"{path} {name}")
        return
    for parameter in command.params:
        flags = [*parameter.opts, *parameter.secondary_opts]
        yield f"command {path}: {'/'.join(flags)}"


def routes() -> Iterator[str]:
    """Yields methods and paths of the server, and the fields of every message."""
    config: Any = {"bundle": "none"}
    description = create_app(ServerConfig(**config)).openapi()
    for path, methods in sorted(description["paths"].items()):
        for method, about in sorted(methods.items()):
            yield f"http {method.upper()} {path} {about['operationId']}"
    for name, schema in sorted(description["components"]["schemas"].items()):
        for field in schema.get("properties", {}):
            required = " (required)" if field in schema.get("required", []) else ""
            yield f"message {name}.{field}{required}"


def settings() -> Iterator[str]:
    """Yields keys of the server's configuration with their defaults."""
    for name, field in ServerConfig.model_fields.items():
        yield f"setting {name} = {field.default!r}"


def public_api() -> list[str]:
    """Returns all lines, sorted."""
    return sorted({*python_names(), *command_options(), *routes(), *settings()})


def _parameters(value: Any) -> str:
    try:
        return ", ".join(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return "..."


def _member(value: type, name: str) -> str:
    member = inspect.getattr_static(value, name)
    if isinstance(member, staticmethod | classmethod) or inspect.isfunction(member):
        return f"{name}({_parameters(getattr(value, name))})"
    return name


if __name__ == "__main__":
    print("\n".join(public_api()))
