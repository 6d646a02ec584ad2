"""Change sets as lines of text: a checksum and JSON.

A line names the version of its format, since lines of several servers may stand in one log.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from recserve.bounds import MAX_ID_LENGTH, MAX_TIME_US
from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.item_records import ItemRecord, check_attributes
from recserve.features.catalog.versions import ChangeSet, ItemChange
from recserve.files import check_format

FORMAT, VERSION = "recserve-items", 1
FIELDS: Mapping[str, type] = {
    **{"v": int, "number": int, "made_for": str, "put": list, "hide": list},
    **{"whole": bool, "restore": list, "assigned": int, "remains": bool},
}
TIME_FIELDS = ("available_from", "expires_at", "added_at")  # a line has those that there are
PUT_FIELDS: Mapping[str, type] = {
    **{"item_id": str, "title": str, "categories": list, "attributes": dict},
    **dict.fromkeys(TIME_FIELDS, int),
    **{"vector": str, "codes": list, "given": int, "embedding": str},
}


def format_line(change_set: ChangeSet) -> bytes:
    """Formats a change set as a line: CRC-32 in 8 hex digits, a space and JSON."""
    fields: dict[str, Any] = {"v": VERSION, "number": change_set.number}
    if change_set.made_for:
        fields["made_for"] = change_set.made_for
    if change_set.changes:
        fields["put"] = [_change_fields(change) for change in change_set.changes]
    if change_set.hidden:
        fields["hide"] = list(change_set.hidden)
    if change_set.whole:
        fields["whole"] = True
    if change_set.restored:
        fields["restore"] = list(change_set.restored)
    if change_set.assigned is not None:
        fields["assigned"] = change_set.assigned
    if change_set.remains:
        fields["remains"] = True
    plain = msgspec.to_builtins  # decimals, bytes and durations as texts
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=plain).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _change_fields(change: ItemChange) -> dict[str, Any]:
    """Returns an item change as JSON values."""
    fields: dict[str, Any] = {
        name: value
        for name, value in vars(change.record).items()
        if value is not None or name not in TIME_FIELDS
    }
    fields["attributes"] = dict(change.record.attributes)
    if change.vector is not None and change.codes is not None:
        fields["vector"] = _encode(change.vector)
        fields["codes"] = change.codes.tolist()
        if change.embedding is not None:  # the vector begins with it
            fields["given"] = len(change.embedding)
    elif change.embedding is not None:
        fields["embedding"] = _encode(change.embedding)
    return fields


def _encode(vector: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()


def _decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def parse_line(line: bytes) -> ChangeSet:
    """Parses a line without its end.

    Raises:
        ValueError: If the line is damaged, or of another version.
    """
    text = line[9:]
    if int(line[:8], 16) != zlib.crc32(text):
        raise ValueError("the checksum differs")
    try:
        fields = json.loads(text)
        version = fields.get("v")
        check_format(None if version is None else f"{FORMAT}/{version}", f"{FORMAT}/{VERSION}", "v")
        _check_fields(fields, FIELDS)
        changes = tuple(_parse_change(one) for one in fields.get("put", ()))
        return ChangeSet(
            fields["number"],
            changes,
            tuple(fields.get("hide", ())),
            fields.get("whole", False),
            made_for=fields.get("made_for", ""),
            restored=tuple(fields.get("restore", ())),
            assigned=fields.get("assigned"),
            remains=fields.get("remains", False),
        )
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing") from error
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a field is of another type: {error}") from error


def _check_fields(fields: dict[str, Any], known: Mapping[str, type]) -> None:
    """Raises ValueError if a field is not known to this version, or of another type."""
    if unknown := sorted(fields.keys() - known.keys()):
        raise ValueError(f"{unknown[0]} is unknown; another version of recserve wrote it")
    for name, value in fields.items():
        if type(value) is not known[name]:
            raise ValueError(f"{name} is {value!r:.80}; expected {known[name].__name__}")
    for name in ("hide", "restore", "categories"):
        if not all(type(text) is str for text in fields.get(name, ())):
            raise ValueError(f"{name} is {fields[name]!r:.80}; expected a list of texts")


def _parse_change(fields: dict[str, Any]) -> ItemChange:
    """Parses an item change."""
    _check_fields(fields, PUT_FIELDS)
    record = ItemRecord(
        fields["item_id"],
        fields["title"],
        fields["categories"],
        fields["attributes"],
        **{name: fields[name] for name in TIME_FIELDS if name in fields},
    )
    if "vector" not in fields:
        embedding = _decode(fields["embedding"]) if "embedding" in fields else None
        return ItemChange(record, embedding=embedding)
    vector = _decode(fields["vector"])
    given = vector[: fields["given"]] if "given" in fields else None
    return ItemChange(record, vector, np.array(fields["codes"], np.uint16), given)


def check_change_set(change_set: ChangeSet, catalog: Catalog | None) -> None:
    """Checks a change set that another process has written.

    Args:
        change_set: The change set.
        catalog: The bundle's catalogue; None if the change set is of another bundle. Then its
            attributes are checked when this bundle takes them.

    Raises:
        ValueError: If the change set does not fit the catalogue.
    """
    changed = [change.record.item_id for change in change_set.changes]
    for ids in (changed, change_set.hidden, change_set.restored):
        for item_id in ids:
            if not isinstance(item_id, str) or not 1 <= len(item_id) <= MAX_ID_LENGTH:
                raise ValueError(f"an item id is no text of 1 to {MAX_ID_LENGTH} characters")
        if len(set(ids)) < len(ids):
            raise ValueError("an item occurs twice")
    if not change_set.whole and not set(changed).isdisjoint(change_set.hidden):
        raise ValueError("an item is put and hidden")
    if change_set.assigned is not None and not 0 <= change_set.assigned <= change_set.number:
        raise ValueError("it assigns a later position")
    for change in change_set.changes:
        _check_change(change, catalog)


def _check_change(change: ItemChange, catalog: Catalog | None) -> None:
    """Raises ValueError if a change does not fit a catalogue, see `check_change_set`."""
    record = change.record
    shown = repr(record.item_id[:80])
    texts = [record.title, *record.categories] if isinstance(record.categories, list) else [None]
    if not all(isinstance(text, str) for text in texts) or not isinstance(record.attributes, dict):
        raise ValueError(f"item {shown}: title, categories or attributes are of another type")
    for time_us in (record.available_from, record.expires_at, record.added_at):
        if time_us is not None and not 0 <= time_us < MAX_TIME_US:
            raise ValueError(f"item {shown}: time {time_us} is out of range")
    for numbers in (change.vector, change.embedding):
        if numbers is not None and not (numbers.size and np.isfinite(numbers).all()):
            raise ValueError(f"item {shown}: expected a vector of finite numbers")
    if catalog is None:
        return
    check_attributes(record.attributes, catalog.items.attributes.schema)
    if change.vector is None or change.codes is None:
        return
    sizes, dim = catalog.semantic_ids.codebook_sizes, int(catalog.vectors.shape[1])
    if change.vector.shape != (dim,) or not np.isfinite(change.vector).all():
        raise ValueError(f"item {shown}: expected a vector of {dim} finite numbers")
    if change.codes.shape != (len(sizes),) or (change.codes >= np.array(sizes)).any():
        raise ValueError(f"item {shown}: expected codes below {sizes}")
