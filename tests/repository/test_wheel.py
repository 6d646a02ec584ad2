"""The wheel works without the checkout: C sources, playground, types and the command are in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

IN_THE_WHEEL = """
import pathlib, recserve, sys
from recserve.kernels.cpu import native_library as library, native
home = pathlib.Path(recserve.__file__).parent
assert home.is_relative_to(sys.argv[1]), home
assert (home / "py.typed").is_file()
assert "<title>" in (home / "server" / "playground" / "index.html").read_text()
print(library.find_compiler() is None or native.library() is not None)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the wheel's content, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode().split("\0")  # fmt: skip
    for name in files:
        source = ROOT / name
        if name and source.is_file() and not source.is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(source.read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(folder), str(copy)], check=True)
    (wheel,) = folder.glob("recserve-*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", *options, "--target", str(site), str(wheel)], check=True)
    return site


def run(site: Path, folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_works_in_an_empty_folder(installed, tmp_path):
    said = run(installed, tmp_path, sys.executable, "-c", IN_THE_WHEEL, str(installed))
    assert said.strip() == "True"


def test_the_command_works_in_an_empty_folder(installed, tmp_path):
    command = str(installed / "bin" / "recserve")
    assert "recommend" in run(installed, tmp_path, sys.executable, command, "--help")
    assert run(installed, tmp_path, sys.executable, command, "--version").startswith("recserve ")
