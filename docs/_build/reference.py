"""Write the generated parts of the reference pages: `make reference`.

The command line, the settings, the metrics and the public names of Python stand in four pages of
docs/reference, between the markers of a page:

    <!-- generated: cli -->
    ...
    <!-- end -->

A test compares the pages with the package.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = ("cli.md", "configuration.md", "metrics.md", "python-api.md")
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Source):\s?(.*)")
ENTRY = re.compile(r"(\*{0,2}\w[\w., |*]*): (.*)")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def fill(page: str) -> str:
    """Returns a page with what is generated today."""
    return BLOCK.sub(lambda found: f"{found[1]}{GENERATORS[found[2]]()}\n{found[3]}", page)


def write() -> None:
    """Writes all pages."""
    for name in PAGES:
        path = REFERENCE / name
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


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
    yield f"```text\n{' '.join([path, *words, '[OPTIONS]'])}\n```\n"
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


def _cell(text: str) -> str:
    """Text that fits a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def python_names() -> str:
    """The public names of the package: signatures and docstrings, as they stand in the source."""
    import recserve

    names = [name for name in recserve.__all__ if name[0] != "_"]
    return "\n".join(line for name in names for line in _describe_name(name))


def _describe_name(name: str) -> Iterator[str]:
    import recserve

    value = getattr(recserve, name)
    node = _definition(value)
    yield f"## {name}\n"
    yield _code(name, node, value)
    yield from _docstring(ast.get_docstring(node) or "")
    if not isinstance(node, ast.ClassDef):
        return
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            yield from _docstring(ast.get_docstring(member) or "")
    for member in node.body:
        if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) or member.name[0] == "_":
            continue
        yield f"### {name}.{member.name}\n"
        yield _code(member.name, member)
        yield from _docstring(ast.get_docstring(member) or "")


def _definition(value: Any) -> Definition:
    """Returns the source of a class or function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    node = tree.body[0]
    assert isinstance(node, Definition)
    return node


def _code(name: str, node: Definition, value: Any = None) -> str:
    """Returns a block with the signature of a function, or of a class and its fields."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if isinstance(node, ast.ClassDef):
        methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]
        shown = _call(name, methods[0].args) if methods else f"{name}({_fields(value)})"
    elif "property" in decorators or "cached_property" in decorators:
        shown = f"{name}: {ast.unparse(node.returns)}" if node.returns else name
    else:
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        shown = f"{_call(name, node.args)}{returns}"
    return f"```python\n{shown}\n```\n"


def _call(name: str, arguments: ast.arguments) -> str:
    """Returns a call with its parameters, one per line if they are long."""
    text = ast.unparse(arguments)
    text = re.sub(r"^(self|cls)(, |$)", "", text)
    if len(name) + len(text) < 96:
        return f"{name}({text})"
    return f"{name}({_one_per_line(_split(text))})"


def _split(text: str) -> list[str]:
    """Divides parameters at the commas outside brackets and quotes."""
    parts, depth, start, quote = [], 0, 0, ""
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def _one_per_line(parts: list[str]) -> str:
    return "".join(f"\n    {part}," for part in parts if part) + "\n" if any(parts) else ""


def _fields(value: type) -> str:
    """Returns the fields of a class and of the classes of recserve that it extends."""
    found: dict[str, str] = {}
    for each in reversed(value.__mro__):
        if not each.__module__.startswith("recserve"):
            continue
        for field in _definition(each).body:
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                found[ast.unparse(field.target)] = ast.unparse(field)
    return _one_per_line(list(found.values()))


def _docstring(text: str) -> Iterator[str]:
    """Yields Markdown of a docstring: its sections become lists, drawings become code."""
    section = ""
    for block in re.split(r"\n\s*\n", text) if text else ():
        lines = block.split("\n")
        if found := SECTION.fullmatch(lines[0]):
            section = found[1]
            rest = textwrap.dedent("\n".join(lines[1:])) or found[2]
            yield f"**{section}**\n"
            yield from (f"- {one}" for one in _entries(rest))
            yield ""
        elif lines[0].startswith("    ") and not section:
            yield f"```text\n{textwrap.dedent(block)}\n```\n"
        else:
            yield f"{block}\n" if not lines[0].startswith("    ") else f"{_cell(block)}\n"


def _entries(text: str) -> list[str]:
    """Returns the entries of a section, each on one line; a name stands in code."""
    entries: list[str] = []
    for line in text.split("\n"):
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        elif (found := ENTRY.fullmatch(line)) and not line.startswith(" "):
            entries.append(f"`{found[1]}`: {found[2]}")
        elif entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    return entries


GENERATORS: dict[str, Callable[[], str]] = {
    "cli": command_line,
    "configuration": configuration,
    "metrics": metrics,
    "python": python_names,
}

if __name__ == "__main__":
    sys.path.insert(0, str(REFERENCE.parents[1]))
    write()
