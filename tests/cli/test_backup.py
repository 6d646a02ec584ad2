"""A backup of a running server holds its users and items; restored, it serves them again."""

import shutil
import subprocess
import sys

import pytest

from recserve import Service
from recserve.cli.backup import back_up, restore
from recserve.features.history.history import StoreUnavailable
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture
def bundle(tmp_path):
    return shutil.copytree(shared_bundle(), tmp_path / "shop.bundle")


def test_what_was_backed_up_is_served_again(tmp_path, bundle):
    with Service.open(bundle, device="cpu") as service:
        item = service.samples(1, 1)["items"][0]
        service.put_items({"items": [{"item_id": "fresh", "title": "Rose"}]})
        service.add_events({"events": [{"user_id": "ann", "item_id": item}]})
        # As an operator does it, from another process than the server's.
        command = ["history", "backup", "--bundle", str(bundle), "--out", str(tmp_path / "copy")]
        done = subprocess.run(
            [sys.executable, "-c", "from recserve.cli import main; main()", *command],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "and 1 journals to" in done.stdout
        service.delete_user("ann")
    for name in ("shop.bundle.history", "shop.bundle.items"):
        with pytest.raises(ValueError, match="exists; stop the server"):
            restore(bundle, None, None, tmp_path / "copy")
        shutil.rmtree(tmp_path / name)
    restore(bundle, None, None, tmp_path / "copy")
    with Service.open(bundle, device="cpu") as service:
        assert [event.item_id for event in service.history("ann").events] == [item]
        assert service.item("fresh").title == "Rose"


def test_what_cannot_be_copied_is_said(tmp_path, bundle):
    with pytest.raises(StoreUnavailable):
        back_up(bundle, f"lmdb:{tmp_path}/none", None, tmp_path / "one")
    with pytest.raises(ValueError, match="BGSAVE"):
        back_up(bundle, "redis://127.0.0.1:1/0", None, tmp_path / "two")
    with pytest.raises(ValueError, match="is not empty"):
        back_up(bundle, None, None, bundle)
    with pytest.raises(ValueError, match="is no backup"):
        restore(bundle, None, None, tmp_path)
