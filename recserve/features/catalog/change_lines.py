"""Change sets as lines of text: a checksum and JSON."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import msgspec
import numpy as np

from recserve.features.catalog.item_records import ItemRecord
from recserve.features.catalog.versions import ChangeSet, ItemChange

TIME_FIELDS = ("available_from", "expires_at", "added_at")  # a line has those that there are


def format_line(change_set: ChangeSet) -> bytes:
    """Formats a change set as a line: CRC-32 in 8 hex digits, a space and JSON."""
    fields: dict[str, Any] = {"number": change_set.number}
    if change_set.changes:
        fields["put"] = [_change_fields(change) for change in change_set.changes]
    if change_set.hidden:
        fields["hide"] = list(change_set.hidden)
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
        raw = np.ascontiguousarray(change.vector, "<f4").tobytes()
        fields["vector"] = base64.b64encode(raw).decode()
        fields["codes"] = change.codes.tolist()
    return fields


def parse_line(line: bytes) -> ChangeSet:
    """Parses a line without its end. Raises ValueError if it is damaged."""
    text = line[9:]
    if int(line[:8], 16) != zlib.crc32(text):
        raise ValueError("the checksum differs")
    try:
        fields = json.loads(text)
        changes = tuple(_parse_change(one) for one in fields.get("put", ()))
        return ChangeSet(int(fields["number"]), changes, tuple(fields.get("hide", ())))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _parse_change(fields: dict[str, Any]) -> ItemChange:
    """Parses an item change."""
    record = ItemRecord(
        fields["item_id"],
        fields["title"],
        fields["categories"],
        fields["attributes"],
        **{name: int(fields[name]) for name in TIME_FIELDS if name in fields},
    )
    if "vector" not in fields:
        return ItemChange(record)
    vector = np.frombuffer(base64.b64decode(fields["vector"]), "<f4").astype(np.float32)
    return ItemChange(record, vector, np.array(fields["codes"], np.uint16))
