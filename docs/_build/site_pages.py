"""Fill the reference pages of the site from the code, so that they describe what is installed.

MkDocs calls `on_page_markdown` for every page (`hooks` in mkdocs.yml). A page holds a marker such
as `<!-- generated: cli -->`, and the marker is replaced by Markdown made from the command line,
the settings, the metrics or the public names. Links to source files become plain text, because
the site does not carry the sources.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARKER = re.compile(r"<!-- generated: (\w+) -->")
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)([^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the markers of a page and removes its links to files outside the site."""
    filled = MARKER.sub(lambda found: GENERATORS[found[1]](), markdown)
    pages = Path(__file__).resolve().parents[1]
    folder = (pages / page.file.src_path).parent

    def shown(link: re.Match[str]) -> str:
        inside = (folder / link[2]).resolve().is_relative_to(pages)
        return link[0] if inside else link[1]

    return LINK.sub(shown, filled)


def command_line() -> str:
    """Every command with its arguments, options, defaults and help texts."""
    import typer.main

    from recserve.cli import app

    return "\n".join(_commands(typer.main.get_command(app), "recserve"))


def _commands(command: Any, path: str) -> Iterator[str]:
    children = getattr(command, "commands", None)
    if children:
        for name in children:
            yield from _commands(children[name], f"{path} {name}")
        return
    yield f"## {path}\n"
    yield f"{_cell(command.help or '')}\n"
    words = [_metavar(p) for p in command.params if _is_argument(p)]
    yield f"```console\n{' '.join([path, *words, '[OPTIONS]'])}\n```\n"
    yield "| option | type | default | meaning |\n|---|---|---|---|"
    for parameter in command.params:
        yield _option_row(parameter)
    yield ""


def _is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def _metavar(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper()
    return name if parameter.required else f"[{name}]"


def _option_row(parameter: Any) -> str:
    flags = [] if _is_argument(parameter) else [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{flag}`" for flag in flags) if flags else f"`{_metavar(parameter)}`"
    default = parameter.default
    if parameter.required:
        default = "required"
    else:
        shown_default = isinstance(default, str | int | float) and default is not False
        default = f"`{default}`" if shown_default else ""
    descriptor = getattr(parameter, "type_descriptor", None)
    kind = _words(descriptor.annotation) if descriptor else parameter.type.name
    if getattr(parameter, "is_flag", False):
        kind = "flag"
    many = " (repeatable)" if getattr(parameter, "multiple", False) else ""
    meaning = _cell(getattr(parameter, "help", None) or "")
    return f"| {shown} | {kind}{many} | {default} | {meaning} |"


def configuration() -> str:
    """Every key of the server's settings with its type, default and bounds."""
    from recserve.config import ENV_PREFIX, ServerConfig

    described = _attribute_texts(ServerConfig.__doc__ or "", list(ServerConfig.model_fields))
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in ServerConfig.model_fields.items():
        text = field.description or described.get(name, "")
        default = "" if field.default is None else f"`{field.default}`"
        default = "" if default in ("`()`", "`[]`") else default
        lines.append(f"| `{name}` | {_type(field)} | {default} | {_cell(text)} |")
    lines += ["", f"The environment variable of a key is `{ENV_PREFIX}` and its name in capitals."]
    return "\n".join(lines)


def _attribute_texts(docstring: str, names: list[str]) -> dict[str, str]:
    """Texts of `name: text` in a docstring, by name."""
    flat = " ".join(docstring.split())
    known = "|".join(names)
    found = re.split(rf"(?:^|\s)((?:(?:{known})(?:, )?)+): ", flat)
    texts: dict[str, str] = {}
    for listed, text in zip(found[1::2], found[2::2], strict=True):
        texts.update(dict.fromkeys(listed.split(", "), text.strip()))
    return texts


def _type(field: Any) -> str:
    """A field's type in words, with its bounds."""
    words = _words(field.annotation)
    bounds = [
        f"{sign} {getattr(limit, attribute):,}"
        for limit in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(limit, attribute, None) is not None
    ]
    return f"{words}, {' and '.join(bounds)}" if bounds else words


def _words(annotation: Any) -> str:
    """A type in words; of a literal its values."""
    options = () if isinstance(annotation, type) else typing.get_args(annotation)
    literals = [
        str(value)
        for option in (annotation, *options)
        if typing.get_origin(option) is typing.Literal
        for value in typing.get_args(option)
    ]
    if literals:
        return ", ".join(f"`{value}`" for value in literals)
    text = str(annotation)
    kinds = {
        "dict": "mapping",
        "Path": "path",
        "SecretStr": "secret",
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "boolean",
    }
    words = next((word for name, word in kinds.items() if name in text), text)
    return f"list of {words}s" if "tuple" in text or "list[" in text else words


def metrics() -> str:
    """Every Prometheus metric with its type, labels and help text."""
    from recserve.metrics import Gauges, Metrics

    registry = Metrics((), (), Gauges).registry
    rows = []
    for collector in registry._collector_to_names:
        if hasattr(collector, "_labelnames"):
            families = [(family, collector._labelnames) for family in collector.describe()]
        else:
            describe = getattr(collector, "describe", collector.collect)
            families = [(f, getattr(f, "_labelnames", ()) or _labels(f)) for f in describe()]
        for family, labels in families:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            shown = ", ".join(f"`{label}`" for label in labels)
            rows.append(f"| `{name}` | {family.type} | {shown} | {_cell(family.documentation)} |")
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *sorted(rows)])


def _labels(family: Any) -> list[str]:
    """Names of the labels of a family's first sample."""
    return list(family.samples[0].labels) if family.samples else []


def python_names() -> str:
    """A mkdocstrings block for each public name of the package."""
    import recserve

    return "\n\n".join(f"::: recserve.{name}" for name in recserve.__all__ if name[0] != "_")


def _cell(text: str) -> str:
    """Text that fits a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


GENERATORS: dict[str, Callable[[], str]] = {
    "cli": command_line,
    "configuration": configuration,
    "metrics": metrics,
    "python": python_names,
}
