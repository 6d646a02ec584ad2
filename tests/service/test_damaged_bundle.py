"""Damage anywhere in a bundle is found when it is opened, not by a later request."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from recserve.bundle.bundle import Bundle, BundleError
from recserve.service import Service
from tests.support.tiny_bundle import shared_bundle


@pytest.mark.parametrize("part", [0.02, 0.5, 0.98])
def test_a_changed_bit_in_any_file_is_found_at_the_start(tmp_path, part):
    """Also in files that only a later request would read, such as the quantiser's."""
    folder = Path(shutil.copytree(shared_bundle(), tmp_path / "bundle"))
    for name, entry in sorted(Bundle.open(folder).manifest.files.items()):
        path, sound = folder / name, (folder / name).read_bytes()
        place = int(entry.size * part)
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
        with pytest.raises(BundleError, match=re.escape(f"{name}: sha256")):
            Service.open(folder, f"lmdb:{tmp_path / 'store'}", "cpu")
        path.write_bytes(sound)


def test_a_quantiser_that_cannot_be_used_is_found_at_the_start(tmp_path):
    """Its hash fits, as after a faulty build."""
    folder = Path(shutil.copytree(shared_bundle(), tmp_path / "bundle"))
    (folder / "quantizer" / "config.json").write_text("{}")
    manifest = json.loads((folder / "manifest.json").read_text())
    said = manifest["files"]["quantizer/config.json"]
    said["size"], said["sha256"] = 2, hashlib.sha256(b"{}").hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="quantizer"):
        Service.open(folder, f"lmdb:{tmp_path / 'store'}", "cpu")
