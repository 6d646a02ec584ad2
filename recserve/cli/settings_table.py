"""Describes every setting of `recserve serve`, from the one schema, for a terminal and the site."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from recserve.config import ENV_PREFIX, ServerConfig

SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
KINDS = {
    "dict": "mapping",
    "Path": "path",
    "SecretStr": "secret",
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
}


@dataclass(frozen=True)
class Setting:
    """A setting as its user reads it.

    Attributes:
        name: Key of the YAML file.
        kind: Type in words, or the allowed values.
        bounds: Bounds of the value in words; empty without any.
        default: Default value; empty if there is none.
        meaning: What it does.
    """

    name: str
    kind: str
    bounds: str
    default: str
    meaning: str

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"{ENV_PREFIX}{self.name.upper()}"


def list_settings() -> list[Setting]:
    """Returns all settings in the order of the schema."""
    meanings = _attribute_texts(ServerConfig.__doc__ or "", list(ServerConfig.model_fields))
    return [
        Setting(
            name,
            describe_kind(field.annotation),
            " and ".join(_bounds(field.metadata)),
            "" if field.default in (None, (), []) else str(field.default),
            field.description or meanings.get(name, ""),
        )
        for name, field in ServerConfig.model_fields.items()
    ]


def settings_text(width: int = 100) -> str:
    """Returns all settings as text for a terminal of this width."""
    lines = [
        "Settings of `recserve serve`: keys of the YAML file of --config, or RECSERVE_* variables.",
        "A flag overrides a variable, which overrides the file.",
    ]
    for setting in list_settings():
        facts = [f"{setting.kind}{f', {setting.bounds}' if setting.bounds else ''}"]
        facts += [f"default {setting.default}"] if setting.default else []
        lines += ["", f"{setting.name}  ({'; '.join(facts)})  {setting.variable}"]
        lines += wrap(setting.meaning, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def describe_kind(annotation: Any) -> str:
    """Returns a type in words; of a literal its values."""
    options = () if isinstance(annotation, type) else typing.get_args(annotation)
    literals = [
        str(value)
        for option in (annotation, *options)
        if typing.get_origin(option) is typing.Literal
        for value in typing.get_args(option)
    ]
    text = str(annotation)
    words = next((word for name, word in KINDS.items() if name in text), text)
    if literals:
        number = ["or an integer"] if int in options else []
        return " ".join([", ".join(f"`{value}`" for value in literals), *number])
    return f"list of {words}s" if "tuple" in text or "list[" in text else words


def _attribute_texts(docstring: str, names: list[str]) -> dict[str, str]:
    """Returns the texts of `name: text` in a docstring, by name."""
    flat = " ".join(docstring.split())
    known = "|".join(names)
    found = re.split(rf"(?:^|\s)((?:(?:{known})(?:, )?)+): ", flat)
    texts: dict[str, str] = {}
    for listed, text in zip(found[1::2], found[2::2], strict=True):
        texts.update(dict.fromkeys(listed.split(", "), text.strip()))
    return texts


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for limit in metadata:
        for attribute, sign in SIGNS:
            if (bound := getattr(limit, attribute, None)) is not None:
                yield f"{sign} {bound:,}"
        if (least := getattr(limit, "min_length", None)) is not None:
            yield f"at least {least} character{'' if least == 1 else 's'}"
        if (most := getattr(limit, "max_length", None)) is not None:
            yield f"at most {most} characters"
