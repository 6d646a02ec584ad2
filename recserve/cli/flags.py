"""Command-line flags that several commands share, and parsers for their values."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

if TYPE_CHECKING:
    from recserve.formats.checkpoint_format import ImportOptions

Device = Literal["auto", "cpu", "cuda"]

BundleFlag = Annotated[Path, typer.Option("--bundle", help="Folder of the bundle.")]
StoreFlag = Annotated[
    str | None, typer.Option("--store", help="History store: lmdb:PATH or redis://HOST:PORT/DB.")
]
ItemsFlag = Annotated[
    Path,
    typer.Option(
        help="Parquet, CSV or JSON lines, or a folder of parts of one kind: item_id, title, "
        "categories, ..."
    ),
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


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Lets a command take flags that others have too, as parameters whose types are dataclasses.

    Each field of such a dataclass is a flag, with the field's type and default. The command gets an
    instance.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        one.name: one.annotation
        for one in signature.parameters.values()
        if is_dataclass(one.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        if one.name not in groups:
            parameters.append(one.replace(kind=one.KEYWORD_ONLY))
            continue
        types = get_type_hints(one.annotation, include_extras=True)
        parameters += [
            one.replace(
                name=flag.name,
                kind=one.KEYWORD_ONLY,
                default=one.empty if flag.default is MISSING else flag.default,
                annotation=types[flag.name],
            )
            for flag in fields(one.annotation)
        ]

    @wraps(command)
    def run(**flags: Any) -> None:
        for name, group in groups.items():
            flags[name] = group(**{flag.name: flags.pop(flag.name) for flag in fields(group)})
        command(**flags)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class ImportFlags:
    """Flags of `bundle import` and of `doctor`, which say how a checkpoint is read."""

    format: Annotated[
        str | None,
        typer.Option(
            help="Of a checkpoint: generic, minionerec, lc-rec, openonerec, or of a package."
        ),
    ] = None
    ids: Annotated[
        Path | None, typer.Option(help="The id of each item: JSON, tables, .npy or safetensors.")
    ] = None
    id_format: Annotated[
        str | None,
        typer.Option(help="generic: how an id is spelled, as in '<a_{}><b_{}>' or '[{text}]'."),
    ] = None
    prompt: Annotated[
        Path | None,
        typer.Option(help="generic: Jinja file of the prompt; openonerec: JSON of its messages."),
    ] = None
    item_text: Annotated[
        str | None,
        typer.Option(help="generic: text of an item in a prompt, as in '{id} {title}'."),
    ] = None
    max_history: Annotated[
        int | None, typer.Option(min=1, help="Items of a history in a prompt; default: the format.")
    ] = None
    rule: Annotated[
        Literal["children", "level", "vocabulary"] | None,
        typer.Option(help="What the softmax of a code runs over; default: that of the format."),
    ] = None
    column: ColumnFlag = None

    def options(self, folder: Path, items: Path, out: Path, **others: Any) -> ImportOptions:
        """Returns the options of an import.

        Args:
            folder: Folder of the checkpoint.
            items: File of items.
            out: Folder of the new bundle.
            others: Options that `doctor` has no flags for.
        """
        from recserve.formats.checkpoint_format import ImportOptions

        given = {flag.name: getattr(self, flag.name) for flag in fields(self)}
        columns = column_names(given.pop("column"))
        return ImportOptions(folder, items, out, columns=columns, **given, **others)


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
