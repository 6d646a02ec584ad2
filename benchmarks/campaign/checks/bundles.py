"""R6: damaged and hostile bundles."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.checks.swaps import swapped
from benchmarks.campaign.site import ADMIN, ADMIN_KEY, Site
from benchmarks.campaign.traffic import slate_bodies

WEIGHTS = "recommender/model.safetensors"
Damage = Callable[[Path, np.random.Generator], None]


def some_file(bundle: Path, random: np.random.Generator) -> Path:
    """Returns a drawn file of a bundle."""
    names = sorted(json.loads((bundle / "manifest.json").read_text())["files"])
    return bundle / names[int(random.integers(len(names)))]


def flip(bundle: Path, random: np.random.Generator) -> None:
    """Flips a bit of a file that the manifest names."""
    path = some_file(bundle, random)
    content = bytearray(path.read_bytes())
    content[int(random.integers(len(content)))] ^= 1 << int(random.integers(8))
    path.write_bytes(content)


def cut(bundle: Path, random: np.random.Generator) -> None:
    """Shortens a file."""
    path = some_file(bundle, random)
    path.write_bytes(path.read_bytes()[: int(random.integers(path.stat().st_size))])


def swap(bundle: Path, random: np.random.Generator) -> None:
    """Exchanges two files."""
    one, other = some_file(bundle, random), some_file(bundle, random)
    while other.read_bytes() == one.read_bytes():
        other = some_file(bundle, random)
    kept = one.read_bytes()
    shutil.copyfile(other, one)
    other.write_bytes(kept)


def remove(bundle: Path, random: np.random.Generator) -> None:
    """Removes a file."""
    some_file(bundle, random).unlink()


def link(bundle: Path, random: np.random.Generator) -> None:
    """Replaces a file by a link to a copy elsewhere."""
    path = some_file(bundle, random)
    away = bundle.parent / f".away-{random.integers(2**32)}"
    shutil.move(path, away)
    path.symlink_to(away)


def outside(bundle: Path, random: np.random.Generator) -> None:
    """Names a file outside of the bundle."""
    names = ("../evil", "/etc/hostname", "a/../../evil", "a\\..\\evil", ".hidden", "a//b")
    said = manifest_of(bundle)
    name = sorted(said["files"])[0]
    said["files"][names[int(random.integers(len(names)))]] = said["files"].pop(name)
    (bundle / "manifest.json").write_text(json.dumps(said))


def other_manifest(bundle: Path, random: np.random.Generator) -> None:
    """Writes something else as the manifest."""
    said = manifest_of(bundle)
    texts = ("", "[]", "{" * 5000, '{"format": "x"}', "\x00" * 64, json.dumps(said)[:-40])
    (bundle / "manifest.json").write_text(texts[int(random.integers(len(texts)))])


def pickled(bundle: Path, random: np.random.Generator) -> None:
    """Puts a pickle where weights are expected; its hash is in the manifest."""
    (bundle / WEIGHTS).write_bytes(b"\x80\x04\x95" + random.bytes(200))
    sign(bundle, WEIGHTS)


def header(bundle: Path, random: np.random.Generator) -> None:
    """Lies about the length of a header."""
    content = (bundle / WEIGHTS).read_bytes()
    size = int(random.choice([0, 7, len(content), 2**40, 2**63]))
    (bundle / WEIGHTS).write_bytes(struct.pack("<Q", size) + content[8:])
    sign(bundle, WEIGHTS)


def offsets(bundle: Path, random: np.random.Generator) -> None:
    """Makes tensors overlap, or gives them a shape or type that does not fit."""
    content = (bundle / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    said = json.loads(content[8 : 8 + size])
    names = sorted(name for name in said if name != "__metadata__")
    one = said[names[int(random.integers(len(names)))]]
    match int(random.integers(4)):
        case 0:
            one["data_offsets"] = [0, 2**62]
        case 1:
            one["shape"] = [2**40, 2**40]
        case 2:
            one["dtype"] = "F64"
        case 3:
            one["shape"] = [*one["shape"], 2]
    text = json.dumps(said).encode()
    (bundle / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    sign(bundle, WEIGHTS)


def not_finite(bundle: Path, random: np.random.Generator) -> None:
    """Makes weights NaN or infinite."""
    weights = {name: value.copy() for name, value in load_file(bundle / WEIGHTS).items()}
    value = weights[sorted(weights)[int(random.integers(len(weights)))]]
    value.reshape(-1)[int(random.integers(value.size))] = (np.nan, np.inf)[int(random.integers(2))]
    save_file(weights, bundle / WEIGHTS, {"format": "pt"})
    sign(bundle, WEIGHTS)


def other_shape(bundle: Path, random: np.random.Generator) -> None:
    """Drops a tensor, or drops its last row: another vocabulary or codebook."""
    weights = load_file(bundle / WEIGHTS)
    name = sorted(weights)[int(random.integers(len(weights)))]
    if random.random() < 0.5:
        del weights[name]
    else:
        weights[name] = np.ascontiguousarray(weights[name][:-1])
    save_file(weights, bundle / WEIGHTS, {"format": "pt"})
    sign(bundle, WEIGHTS)


def manifest_of(bundle: Path) -> dict:
    """Returns the manifest."""
    return json.loads((bundle / "manifest.json").read_text())


def sign(bundle: Path, name: str) -> None:
    """Puts the hash and the size of a changed file into the manifest."""
    content, said = (bundle / name).read_bytes(), manifest_of(bundle)
    said["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (bundle / "manifest.json").write_text(json.dumps(said))


DAMAGES: tuple[Damage, ...] = (
    *(flip, cut, swap, remove, link, outside, other_manifest),
    *(pickled, header, offsets, not_finite, other_shape),
)


@check("R6", "damaged bundles", "12 kinds of damage to drawn places", cases=500, minimum_s=12)
def damaged(site: Site, budget: Budget) -> Finding:
    """Loads damaged bundles into a server, which must refuse them and go on."""
    bundles = site.shelf()
    random = np.random.default_rng(site.seed)
    (body,) = slate_bodies(random, 1)
    settings = {"bundle": bundles / "one", "bundles_dir": bundles, "admin_keys": [ADMIN_KEY]}
    tried, accepted, changed = 0, [], 0
    with site.server(**settings, kv_bytes=2**22) as server:
        before = server.post("/v1/recommend", body).json()
        for number in budget.cases(500, least=len(DAMAGES)):
            damage = DAMAGES[number % len(DAMAGES)]
            # A name of its own: hashes of files that are known by name and time may be cached.
            folder = Path(shutil.copytree(bundles / "two", bundles / f"bad{number}"))
            damage(folder, random)
            tried += 1
            refused = server.post("/admin/bundle:load", {"path": folder.name}, headers=ADMIN)
            if refused.status_code == 202:
                with server.client(headers=ADMIN) as client:
                    while (said := client.get("/admin/bundle").json())["state"] == "loading":
                        pass
                    if said["state"] != "failed":
                        accepted.append(damage.__name__)
                        swapped(client, "load", {"path": "one"})
            elif refused.status_code >= 500:
                accepted.append(f"{damage.__name__}: {refused.status_code}")
            answer = server.post("/v1/recommend", body).json()
            changed += [x["item_id"] for x in answer["items"]] != [
                x["item_id"] for x in before["items"]
            ]
            shutil.rmtree(folder)
        crashed = server.process.poll() is not None
        errors = server.log.read_text(errors="replace").count("internal error")
    return Finding(
        tried,
        (
            Figure("accepted", len(accepted), 0),
            Figure("answers that changed", changed, 0),
            Figure("server ended", crashed, 0),
            Figure("refused as internal error", errors, 0),
        ),
        ", ".join(sorted(set(accepted))),
    )
