"""What the files of a drafter leave open, and the fields of config.json that select a reading.

Some checkpoints can be read in more than one way without an error: the numbers of the target's
layers count from 0 or 1, or a flag has two meanings. A wrong reading changes no text, because every
draft is verified, but it lowers acceptance. `recserve doctor DRAFTER` tries all readings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from recserve.models.loading import opened_file, read_json, tensor_files
from recserve.models.write_tensors import write_tensors


@dataclass(frozen=True)
class CheckpointReading:
    """One way to read a checkpoint.

    Attributes:
        answer: What it means, in a few words.
        fields: Changes of config.json that select it. An object changes fields inside an object,
            and None removes a field.
        tensors: Tensors that it replaces, by their names in the files.
    """

    answer: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointAmbiguity:
    """Something that the files leave open.

    Attributes:
        name: The question, as a noun.
        default: Answer of the reading that the loader takes.
        others: The other readings.
        reason: Why the loader takes this reading; empty if it is the usual one.
    """

    name: str
    default: str
    others: tuple[CheckpointReading, ...]
    reason: str = ""


def changed(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with the changes of a reading."""
    result = dict(fields)
    for name, value in changes.items():
        if isinstance(value, Mapping):
            inner = result.get(name)
            result[name] = changed(inner if isinstance(inner, Mapping) else {}, value)
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def write_view(folder: Path, reading: CheckpointReading, view: Path) -> Path:
    """Makes `view` a folder with the same files, changed as a reading asks.

    Args:
        folder: Folder of the drafter.
        reading: The reading.
        view: New folder. Files without a change are links.

    Returns:
        The folder of the view.
    """
    view.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name != "config.json":
            (view / path.name).symlink_to(path.resolve())
    fields = changed(read_json(folder / "config.json"), reading.fields)
    (view / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    files = tensor_files(folder) if reading.tensors else {}
    for path in {files[name] for name in reading.tensors}:
        with opened_file(path) as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        (view / path.name).unlink()
        stored |= {name: own for name, own in reading.tensors.items() if files[name] == path}
        write_tensors(stored, view / path.name)
    return view
