"""Fill the reference pages of the site from the code, so that they describe what is installed.

MkDocs calls `on_page_markdown` for every page (`hooks` in mkdocs.yml). A page holds a marker such
as `<!-- generated: cli -->`, and the marker is replaced by Markdown made from the command line,
the settings, the metrics or the public names. Links to source files become plain text, because
the site does not carry the sources.
"""

from __future__ import annotations

import re
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
    from recserve.cli.settings_table import describe_kind

    flags = [] if _is_argument(parameter) else [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{flag}`" for flag in flags) if flags else f"`{_metavar(parameter)}`"
    default = parameter.default
    if parameter.required:
        default = "required"
    else:
        shown_default = isinstance(default, str | int | float) and default is not False
        default = f"`{default}`" if shown_default else ""
    descriptor = getattr(parameter, "type_descriptor", None)
    kind = describe_kind(descriptor.annotation) if descriptor else parameter.type.name
    if getattr(parameter, "is_flag", False):
        kind = "flag"
    many = " (repeatable)" if getattr(parameter, "multiple", False) else ""
    meaning = _cell(getattr(parameter, "help", None) or "")
    return f"| {shown} | {kind}{many} | {default} | {meaning} |"


def configuration() -> str:
    """Every key of the server's settings with its type, default and bounds."""
    from recserve.cli.settings_table import list_settings
    from recserve.config import ENV_PREFIX

    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for one in list_settings():
        kind = f"{one.kind}, {one.bounds}" if one.bounds else one.kind
        default = f"`{one.default}`" if one.default else ""
        lines.append(f"| `{one.name}` | {kind} | {default} | {_cell(one.meaning)} |")
    lines += ["", f"The environment variable of a key is `{ENV_PREFIX}` and its name in capitals."]
    return "\n".join(lines)


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
