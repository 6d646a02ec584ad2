"""Damaged and hostile checkpoints, at the import and at the doctor, alone and with a map.

Each case draws a file and a damage. It is imported or refused. A refusal names the file or the
field in words of its own, leaves nothing behind, and the doctor says the same without a traceback.
"""

import copy
import json
import os
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file as save_array
from safetensors.torch import load_file, save_file

from recserve.doctor.checkpoint_checks import examine_checkpoint
from recserve.formats.conversion import import_checkpoint
from tests.support.foreign_recommenders import foreign
from tests.support.imports import options

# What Python, numpy, torch and Rust say of themselves. A user cannot act on it.
FOREIGN_WORDS = re.compile(
    r"Traceback|NoneType|has no attribute|KeyError|TypeError|IndexError|AttributeError|unhashable|"
    r"not subscriptable|object is not|list index|unsupported operand|invalid literal|"
    r"not supported between|must be real number|expected str, bytes|panicked|\bint\(\)|"
    r"out of bounds for|could not convert|broadcast|Overflow"
)
FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("model.safetensors", "prompt.jinja", "items.parquet"),
    *("ids", "ids"),  # more often: it has many kinds
)
KINDS = {
    "generic": (".json", ".parquet", ".csv", ".jsonl", ".npy", ".safetensors"),
    "minionerec": (".json", ".txt"),
    "lc-rec": (".json",),
}
FORMATS = ("generic", "minionerec", "lc-rec", "openonerec")
VALUES = (
    *(None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", [], {}, [[]]),
    *("\ud800", "../../etc/passwd", "x" * 10_000, {"a": None}, [None], 2**63, -(2**63)),
)


def spots(value, at=()):
    """Yields the path of each value inside JSON."""
    if at:
        yield at
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in list(inner)[:40]:
            yield from spots(one, (*at, key))


def damage_json(path, draw):
    """Replaces, removes or adds one value."""
    content = json.loads(path.read_text())
    places = list(spots(content))
    at = places[draw.integers(len(places))]
    place = content
    for key in at[:-1]:
        place = place[key]
    value = copy.deepcopy(VALUES[draw.integers(len(VALUES))])
    if draw.integers(4) == 0 and isinstance(place, dict):
        del place[at[-1]]
    else:
        place[at[-1]] = value
    path.write_text(json.dumps(content))
    return f"{at} = {value!r:.40}"


def damage_weights(path, draw):
    """Changes shape, type, numbers or names of a tensor."""
    weights = load_file(path)
    name = sorted(weights)[draw.integers(len(weights))]
    kind = draw.integers(6)
    tensor = weights[name]
    if kind == 0:
        del weights[name]
    elif kind == 1:
        weights[name] = tensor[:-1].clone()
    elif kind == 2:
        weights[name] = tensor.flatten()[:1].reshape(()).clone()
    elif kind == 3:
        weights[name] = tensor.clone().view(-1).index_fill(0, torch.tensor([0]), np.nan)
        weights[name] = weights[name].view(tensor.shape)
    elif kind == 4:
        weights[name] = tensor.to(torch.int8)
    else:
        weights["model.other.weight"] = tensor.clone()
    save_file(weights, path, {"format": "pt"})
    return f"{name}, kind {kind}"


def damage_bytes(path, draw):
    """Damages a file as a whole."""
    content = path.read_bytes()
    kind = draw.integers(9)
    path.unlink()
    if kind == 0:
        return "missing"
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.write_bytes(b"")
    elif kind == 3:
        path.write_bytes(content[: draw.integers(len(content))])
    elif kind == 4:
        path.write_bytes(draw.bytes(100))
    elif kind == 5:
        os.mkfifo(path)
    elif kind == 6:
        path.symlink_to(path.name)
    elif kind == 7:
        path.write_text("[" * 100_000)
    else:
        path.write_text(json.dumps([1, "a", None]))
    return f"bytes {kind}"


def write_ids(path, ids):
    """Writes ids, pairs of item and texts, in the kind of file that the suffix names."""
    suffix, texts = path.suffix, [(item, "".join(map(str, one))) for item, one in ids]
    table = {"item_id": [item for item, _ in ids], "semantic_id": [text for _, text in texts]}
    if suffix == ".json":
        lines = (f"{json.dumps(item)}: {json.dumps(one)}" for item, one in ids)
        path.write_text("{" + ", ".join(lines) + "}")
    elif suffix == ".txt":
        path.write_text("".join(f"{text}\tTitle\t{item}\n" for item, text in texts))
    elif suffix == ".csv":
        path.write_text("item_id,semantic_id\n" + "".join(f"{i},{t}\n" for i, t in texts))
    elif suffix == ".jsonl":
        rows = ({"item_id": item, "semantic_id": one} for item, one in ids)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == ".parquet":
        pq.write_table(pa.table(table), path)
    else:
        found = [
            [int(number or 0) for number in re.findall(r"_(-?\d*)>", text)] for _, text in texts
        ]
        width = max(map(len, found), default=0)
        array = np.array([(one + [0] * width)[:width] for one in found], np.int64)
        array = array.reshape(len(found), width)
        np.save(path, array) if suffix == ".npy" else save_array({"ids": array}, path)


def damage_ids(path, ids, draw):
    """Writes a map with a fault."""
    kind, at = draw.integers(9), int(draw.integers(len(ids)))
    item, texts = ids[at]
    changed = {
        0: [(item, texts), *ids],  # twice
        1: ids[:at] + ids[at + 1 :],
        2: [],
        3: [*ids[:at], (item, texts[:-1]), *ids[at + 1 :]],
        4: [*ids[:at], (item, [*texts, "<d_1>"]), *ids[at + 1 :]],
        5: [*ids[:at], (item, ["<a_99999>", *texts[1:]]), *ids[at + 1 :]],
        6: [*ids[:at], (item, ["<a_-1>", *texts[1:]]), *ids[at + 1 :]],
        7: [*ids[:at], (item, ["<a_1>", *texts[1:]]), *ids[at + 1 :]],
        8: [*ids[:at], (item, ["<x_\u00e9>"]), *ids[at + 1 :]],
    }[int(kind)]
    write_ids(path, changed)
    return f"ids {kind} at {at}"


def damage_table(path, draw):
    """Writes items that are no items."""
    kind = draw.integers(5)
    tables = (
        {"item_id": ["0", "0"]},
        {"title": ["a"]},
        {"item_id": [1.5, None]},
        {"item_id": ["0", "999"]},
        {"item_id": pa.array([], pa.string())},
    )
    pq.write_table(pa.table(tables[kind]), path)
    return f"table {kind}"


def spoil(files, ids, draw):
    """Damages one drawn file; returns what was done."""
    name = FILES[draw.integers(len(FILES))]
    path = files[name]
    if (
        name == "ids"
        and path.stem == "ids"
        and (path.suffix != ".json" or draw.integers(2))
        and draw.integers(3)
    ):
        return path.name, damage_ids(path, list(ids.items()), draw)
    if not path.exists():
        path.write_text("{}")
    whole = draw.integers(3) == 0 or (name.endswith(".json") and path.read_text() == "{}")
    if whole or path.suffix == ".jinja" or (name == "ids" and path.suffix != ".json"):
        return name, damage_bytes(path, draw)
    if path.suffix == ".json":
        return name, damage_json(path, draw)
    return name, (damage_weights if name == "model.safetensors" else damage_table)(path, draw)


def check(root, seed, format):
    """Damages a checkpoint, and asks all doors."""
    draw = np.random.default_rng(seed)
    before = "<s_" if format == "openonerec" else "<"
    data = foreign(root, ["qwen2", "llama", "qwen3"][draw.integers(3)], before=before)
    files = {name: data.folder / name for name in FILES[:5]}
    if format == "openonerec":
        given = options(data, root, format, max_history=3, events=None)
        files |= {"prompt.jinja": given.prompt}
    else:
        ids = root / f"ids{KINDS[format][draw.integers(len(KINDS[format]))]}"
        given = options(data, root, format, max_history=3, events=None, ids=ids)
        write_ids(ids, list(data.ids.items()))
        files |= {"prompt.jinja": root / "prompt.jinja"}
    files |= {"items.parquet": data.items, "ids": given.ids}
    what = spoil(files, data.ids, draw)
    refusal = None
    try:
        import_checkpoint(given, lambda line: None)
    except ValueError as error:
        refusal = str(error)
        assert not given.out.exists(), what
    shutil.rmtree(given.out, ignore_errors=True)
    for histories, asked in ((0, None), (1, given)):
        found = examine_checkpoint(data.folder, asked, histories)
        failed = [one.detail for one in found if one.state == "fail"]
        for text in [refusal or "", *(one.detail for one in found)]:
            assert not FOREIGN_WORDS.search(text), (what, text)
        if asked is not None:
            assert bool(failed) == (refusal is not None), (what, refusal, failed)
    array = given.ids.suffix in (".npy", ".safetensors")
    sure = re.fullmatch(r"ids [0-2] .*" if array else r"ids [0-25-8] .*", what[1])
    assert refusal is not None or not (sure or what[0] == "model.safetensors"), what
    if refusal is not None:
        stem = what[0].split(".")[0]
        named = (*FILES, stem, "sid2pid", "messages", data.folder.name, "item", "prompt")
        assert any(word in refusal for word in named), (what, refusal)
        assert len(refusal) < 2000, (what, len(refusal))


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_checkpoint_is_refused_in_words(format, tmp_path):
    for seed in range(8):
        check(tmp_path / str(seed), 100 * len(format) + seed, format)


@pytest.mark.parametrize("name", ["epoch=3.ckpt", "checkpoint_9.pt", "memgen.pth"])
def test_files_of_the_family_of_tiger_are_refused_by_name(name, tmp_path):
    (tmp_path / name).write_bytes(b"PK")
    found = examine_checkpoint(tmp_path)
    assert found[0].state == "fail"
    assert name in found[0].detail and "encoder-decoders" in found[0].detail


def test_a_tokeniser_that_is_missing_can_be_saved_there(tmp_path):
    data = foreign(tmp_path)
    (data.folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer.json; save it there.*save_pretrained"):
        import_checkpoint(options(data, tmp_path, "lc-rec"), lambda line: None)


def test_an_array_that_claims_to_be_huge_is_refused(tmp_path):
    data, path = foreign(tmp_path), tmp_path / "ids.npy"
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000, 3), }\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ValueError, match="no plain .npy"):
        import_checkpoint(options(data, tmp_path, "generic", ids=path), lambda line: None)


def test_a_bundle_below_a_file_is_refused(tmp_path):
    data = foreign(tmp_path)
    out = data.items / "bundle"
    with pytest.raises(ValueError, match=r"items.parquet is a file; choose another folder"):
        import_checkpoint(options(data, tmp_path, "generic", out=out), lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 400, 20))
def test_hundreds_of_damaged_checkpoints_are_refused_in_words(seed, tmp_path):
    for one in range(seed, seed + 20):
        check(tmp_path / str(one), 10_000 + one, FORMATS[one % 4])
