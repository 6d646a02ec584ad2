"""Command-line flags that several commands share, and parsers for their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Device = Literal["auto", "cpu", "cuda"]

BundleFlag = Annotated[Path, typer.Option("--bundle", help="Folder of the bundle.")]
StoreFlag = Annotated[
    str | None, typer.Option("--store", help="History store: lmdb:PATH or redis://HOST:PORT/DB.")
]
DeviceFlag = Annotated[Device, typer.Option("--device", help="Device of the models.")]
UserFlag = Annotated[str | None, typer.Option("--user", help="User whose history is read.")]
HistoryFlag = Annotated[
    list[str] | None,
    typer.Option("--history", help="Item ids, oldest first; repeat the flag, or use commas."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the JSON of the HTTP route.")]
FieldsFlag = Annotated[
    list[str] | None,
    typer.Option(help="Columns of the catalogue to show; repeat the flag, or use commas."),
]
ScoringFlag = Annotated[
    str | None,
    typer.Option(help='Another scoring rule, as JSON: \'{"rule": "vocabulary"}\'.'),
]
ColumnFlag = Annotated[
    list[str] | None,
    typer.Option(
        help="OURS=THEIRS: the name of a column in your file, as in --column item_id=movieId."
    ),
]
# Flags of `bundle import`, which `doctor` takes too.
FormatFlag = Annotated[
    str | None,
    typer.Option(help="Of a checkpoint: generic, minionerec, lc-rec, openonerec, or of a package."),
]
IdsFlag = Annotated[
    Path | None, typer.Option(help="The id of each item: JSON, tables, .npy or safetensors.")
]
IdFormatFlag = Annotated[
    str | None,
    typer.Option(help="generic: how an id is spelled, as in '<a_{}><b_{}>' or '[{text}]'."),
]
ItemTextFlag = Annotated[
    str | None,
    typer.Option(help="generic: text of an item in a prompt, as in '{id} {title}'."),
]
PromptFlag = Annotated[
    Path | None,
    typer.Option(help="generic: Jinja file of the prompt; openonerec: JSON of its messages."),
]
MaxHistoryFlag = Annotated[
    int | None, typer.Option(min=1, help="Items of a history in a prompt; default: the format.")
]
RuleFlag = Annotated[
    Literal["children", "level", "vocabulary"] | None,
    typer.Option(help="What the softmax of a code runs over; default: that of the format."),
]


def ids(values: list[str] | None) -> list[str] | None:
    """Returns the ids of a repeatable flag with comma-separated values; None if it is absent."""
    return [part for value in values for part in value.split(",") if part] if values else None


def pairs(values: list[str] | None, flag: str, form: str) -> dict[str, str]:
    """Parses a repeatable flag of the form NAME=VALUE. Raises BadParameter.

    Args:
        values: The values; None without the flag.
        flag: The flag.
        form: The form of a value, for messages.
    """
    found: dict[str, str] = {}
    for text in values or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"expected {form}, got {text!r}", param_hint=flag)
        if name in found:
            message = f"{name} is given twice, as {found[name]!r} and {value!r}"
            raise typer.BadParameter(message, param_hint=flag)
        found[name] = value
    return found


def column_names(values: list[str] | None) -> dict[str, str]:
    """Parses `--column`. Raises BadParameter."""
    return pairs(values, "--column", "OURS=THEIRS, such as item_id=movieId")


def json_value(text: str, flag: str) -> Any:
    """Parses the JSON value of a flag. Raises BadParameter."""
    from recserve.schemas.numbers import exact_number

    try:
        return json.loads(text, parse_float=exact_number)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON ({error})", param_hint=flag) from None


def moment(text: str, flag: str) -> int:
    """Parses a date or a time as microseconds since 1970; without a zone it is UTC.

    Raises BadParameter.
    """
    from recserve.features.tables.rfc3339 import parse_timestamp

    try:
        return int(parse_timestamp(text, utc=True) * 1_000_000)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from None


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Parses comma-separated numbers of at least 1. Raises BadParameter."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        message = f"{text!r}: expected numbers of at least 1, separated by commas"
        raise typer.BadParameter(message, param_hint=flag)
    return found


def yaml_mapping(path: Path, flag: str) -> dict[str, Any]:
    """Reads a YAML file with one mapping. Raises BadParameter."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint=flag) from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise typer.BadParameter(f"{path}: expected a mapping, got {kind}", param_hint=flag)
    return found


def yaml_list(path: Path, key: str) -> list[Any]:
    """Reads a YAML file whose only key holds a list. Raises BadParameter."""
    found = yaml_mapping(path, f"--{key}")
    if set(found) != {key} or not isinstance(found[key], list):
        listed = ", ".join(map(str, found))
        message = f"{path}: expected one key {key} with a list, got {listed}"
        raise typer.BadParameter(message, param_hint=f"--{key}")
    values: list[Any] = found[key]
    return values
