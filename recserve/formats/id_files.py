"""Reads the file of an import that says which item has which id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recserve.features.tables.conversions import convert_ids
from recserve.features.tables.input_table import InputTable
from recserve.features.tables.parquet import SchemaError
from recserve.files import UnreadableFile, parse_json, read_bytes, regular_file
from recserve.formats.checkpoint_format import IdSpelling, ImportFault, check_unicode

ITEM_ID, SEMANTIC_ID = COLUMNS = ("item_id", "semantic_id")
PICKLED = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".npz")
MAX_ROWS_BYTES = 16 << 30
LETTERS = "abcdefgh"  # of the levels of a map NAME.index.json


def read_ids(path: Path, item_ids: Sequence[str], spelling: IdSpelling) -> np.ndarray:
    """Returns the codes [I, L] int64 of the items.

    The suffix of the file tells its kind:

    - `.json`: an object of ids by item id.
    - `.npy` and `.safetensors`: integers [I, L], in the order of the items.
    - Parquet, CSV, JSON lines: columns `item_id` and `semantic_id`.

    An id is a text such as `<a_1><b_2>`, a list of such texts or of integers, or a text of numbers.

    Args:
        path: The file.
        item_ids: [I] ids of the items, in the order of their rows.
        spelling: How an id is spelled.

    Raises:
        ImportFault: If the file cannot be read, an item has no id, or an id is none.
    """
    suffix = path.suffix.lower()
    if suffix in PICKLED:
        raise ImportFault(
            f"{path.name} may hold pickled objects, which are not read because unpickling runs "
            "code; where you trust it, write its ids as numbers: "
            "numpy.save('ids.npy', torch.load(FILE).numpy())"
        )
    try:
        if suffix in (".npy", ".safetensors"):
            return _check_array(path, _array(path, suffix), len(item_ids), spelling)
        found = _object(path) if suffix == ".json" else _table(path)
    except (UnreadableFile, SchemaError) as error:
        raise ImportFault(str(error)) from error
    return match_ids(path, found, item_ids, spelling)


def match_ids(
    path: Path, found: dict[str, Any], item_ids: Sequence[str], spelling: IdSpelling
) -> np.ndarray:
    """Returns the codes [I, L] of the items from ids by item id. Raises ImportFault."""
    lacking = [item_id for item_id in item_ids if item_id not in found]
    if lacking:
        raise ImportFault(
            f"{path} has no id for {len(lacking)} of {len(item_ids)} items, such as item "
            f"{lacking[0][:80]!r}; add them, or leave these items out of the items' file"
        )
    codes = np.empty((len(item_ids), spelling.num_levels), np.int64)
    for row, item_id in enumerate(item_ids):
        read = spelling.read(found[item_id])
        if read is None:
            raise ImportFault(
                f"{path}: item {item_id[:80]!r} has the id {found[item_id]!r:.80}; expected "
                f"{spelling.num_levels} codes as in {spelling.text}, or their numbers"
            )
        codes[row] = read
    return codes


def read_texts(path: Path, item_ids: Sequence[str]) -> list[str]:
    """Returns the text of each item's id, of a JSON object or a table as in `read_ids`.

    A list of texts is joined by `, `.

    Raises:
        ImportFault: If the file cannot be read, or an item has no text.
    """
    try:
        found = _object(path) if path.suffix.lower() == ".json" else _table(path)
    except (UnreadableFile, SchemaError) as error:
        raise ImportFault(str(error)) from error
    texts: list[str] = []
    for item_id in item_ids:
        value = found.get(item_id)
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            value = ", ".join(value)
        if not isinstance(value, str) or not value:
            raise ImportFault(
                f"{path}: item {item_id[:80]!r} has the id {value!r:.80}; expected a text or "
                "a list of texts"
            )
        texts.append(check_unicode(value, f"{path}: the id of item {item_id[:80]!r}"))
    return texts


def read_index(
    path: Path, item_ids: Sequence[str], found: dict[str, Any] | None = None
) -> tuple[IdSpelling, np.ndarray]:
    """Returns spelling and codes of a map NAME.index.json, whose tokens are `<a_i>`, `<b_j>`, ...

    Args:
        path: The file.
        item_ids: [I] ids of the items.
        found: Its ids by item id; None reads the file.

    Raises:
        ImportFault: If it is no such map, or lacks an item.
    """
    try:
        found = _object(path) if found is None else found
    except UnreadableFile as error:
        raise ImportFault(str(error)) from error
    first = next(iter(found.values()), None)
    text = "".join(map(str, first)) if isinstance(first, list) else str(first)
    levels = text.count("<")
    if not 1 <= levels <= len(LETTERS):
        raise ImportFault(
            f"{path}: expected ids by item number, such as "
            '{"0": ["<a_236>", "<b_231>", "<c_226>"]}'
        )
    spelling = IdSpelling("".join(f"<{letter}_{{}}>" for letter in LETTERS[:levels]))
    return spelling, match_ids(path, found, item_ids, spelling)


def _object(path: Path) -> dict[str, Any]:
    content = parse_json(read_bytes(path), path, unique=True)
    if not isinstance(content, dict):
        raise ImportFault(f"{path}: expected a JSON object of ids by item id")
    return content


def _table(path: Path) -> dict[str, Any]:
    source = InputTable(path, COLUMNS)
    ids = source.require(ITEM_ID, convert_ids, "item ids", pa.nulls(len(source), pa.string()))
    source.check()
    if SEMANTIC_ID not in source.table.column_names:
        raise ImportFault(f"{path} has no column {SEMANTIC_ID}; it holds the id of each item")
    values = source.table.column(SEMANTIC_ID).to_pylist()
    names = ids.to_pylist()
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ImportFault(f"{path}: item {str(twice)[:80]!r} occurs twice; an item has one id")
    return dict(zip(names, values, strict=True))


def _array(path: Path, suffix: str) -> np.ndarray:
    """Returns the array of a file. Nothing is unpickled."""
    if regular_file(path).stat().st_size > MAX_ROWS_BYTES:
        raise ImportFault(f"{path}: larger than {MAX_ROWS_BYTES} bytes")
    if suffix == ".npy":
        try:
            # A map of the file: a header that claims a larger array is refused, not allocated.
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (ValueError, OSError, EOFError, OverflowError) as error:
            raise ImportFault(f"{path} is no plain .npy file: {str(error):.200}") from None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(path)
    except (SafetensorError, AttributeError) as error:
        raise ImportFault(f"{path} is not a safetensors file: {error}") from None
    if len(arrays) != 1:
        raise ImportFault(f"{path} has {len(arrays)} arrays; expected one, with the ids")
    return next(iter(arrays.values()))


def _check_array(path: Path, array: np.ndarray, items: int, spelling: IdSpelling) -> np.ndarray:
    wanted = (items, spelling.num_levels)
    if array.dtype.kind not in "iu" or array.shape != wanted:
        turned = "; transpose it" if array.shape == wanted[::-1] else ""
        raise ImportFault(
            f"{path} holds {array.dtype} of shape {array.shape}; expected integers of shape "
            f"{wanted}, one row for each item of the items' file, in its order{turned}"
        )
    if int(array.min()) < 0 or int(array.max()) >= 1 << 16:
        raise ImportFault(
            f"{path} holds codes of {array.min()} to {array.max()}; expected 0 to {(1 << 16) - 1}"
        )
    return array.astype(np.int64)
