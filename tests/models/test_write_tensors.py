"""Files of weights: whole, as readable as their neighbours, and free of shared memory."""

import ast
import os
import stat

import pytest
import torch
from safetensors import safe_open

from recserve.files import TEMPORARY, whole_file
from recserve.models.saving import save_language_model
from recserve.models.write_tensors import write_tensors
from tests.support.drafter_folders import uneven_model, write_drawn
from tests.support.paths import ROOT

DRAFTERS = ("eagle-1", "eagle-3", "mtp", "medusa", "specformer", "dflash", "jetspec")


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_a_file_has_the_permissions_of_any_new_file(tmp_path, umask):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    path.chmod(0o600)
    write_tensors({"x": torch.ones(2)}, path)
    assert modes(tmp_path) == {"model.safetensors": 0o666 & ~umask}


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    path = tmp_path / "model.safetensors"
    (tmp_path / f"{TEMPORARY}model.safetensors").write_bytes(b"half")
    write_tensors({"x": torch.ones(2)}, path)
    assert list(tmp_path.iterdir()) == [path]


def test_nobody_finds_a_part_of_a_file(tmp_path):
    """Two processes may replace a shared file at once; here, one does while the other writes."""
    path = tmp_path / "counts"
    path.write_bytes(b"old")
    with whole_file(path, shared=True) as new:
        new.write_bytes(b"ne")
        assert path.read_bytes() == b"old"
        assert new.name.startswith(TEMPORARY) and str(os.getpid()) in new.name
        new.write_bytes(b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_views_of_one_tensor_and_strings_are_read_back(tmp_path):
    fused = torch.arange(12.0, requires_grad=True).view(3, 4)
    path = tmp_path / "model.safetensors"
    write_tensors({"a": fused[0], "b": fused[1:], "column": fused[:, 1]}, path, {"format": "pt"})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("a").tolist() == fused[0].tolist()
        assert file.get_tensor("b").tolist() == fused[1:].tolist()
        assert file.get_tensor("column").tolist() == fused[:, 1].tolist()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    path = tmp_path / "model.safetensors"
    write_tensors({"x": torch.ones(2)}, path)
    monkeypatch.setattr("recserve.models.write_tensors.save_file", full)
    with pytest.raises(OSError, match="no space"):
        write_tensors({"x": torch.zeros(2)}, path)
    with safe_open(path, "pt") as file:
        assert file.get_tensor("x").tolist() == [1, 1]


def test_all_safetensors_files_are_written_whole():
    """safetensors writes a file in place, readable for its owner alone."""
    calls = whole = 0
    for source in (ROOT / "recserve").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            calls += getattr(getattr(node, "func", None), "id", "") == "save_file"
            if isinstance(node, ast.With) and "whole_file(" in ast.unparse(node.items[0]):
                whole += ast.unparse(node).count(" save_file(")
    assert calls == whole >= 8


@pytest.mark.parametrize("kind", ["language model", *DRAFTERS])
def test_another_user_can_read_each_file_of_a_model(tmp_path, kind):
    """A server often runs as another user than the training did."""
    if kind == "language model":
        save_language_model(uneven_model(), tmp_path)
    else:
        write_drawn(kind, tmp_path)
    (tmp_path / "neighbour").touch()
    assert len(set(modes(tmp_path).values())) == 1
