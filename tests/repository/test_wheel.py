"""The sdist builds a wheel, and the wheel works without the checkout.

C sources, the playground, types and the command are in it.
"""

import os
import subprocess
import sys
import tarfile
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
playground = home / "server" / "playground"
assert "<title>" in (playground / "index.html").read_text()
assert {"app.js", "base.css", "mark.svg"} <= {file.name for file in playground.iterdir()}
print(library.find_compiler() is None or native.library() is not None)
"""


SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The sdist of a copy of the sources, links at the top included."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode().split("\0")  # fmt: skip
    for name in files:
        source, copied = ROOT / name, copy / name
        if not name or not source.exists():
            continue
        copied.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copied.symlink_to(source.readlink())
        else:
            copied.write_bytes(source.read_bytes())
    subprocess.run([sys.executable, "-c", SDIST, str(folder)], cwd=copy, check=True)
    (built,) = folder.glob("recserve-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def installed(sdist, tmp_path_factory) -> Path:
    """A folder with the content of the wheel that the sdist builds."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(folder), str(sdist)], check=True)
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


def test_the_sdist_holds_what_builds_the_wheel_and_no_link(sdist):
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert {"LICENSE", "README.md", "pyproject.toml", "constraints.txt"} <= names
    tops = {name.partition("/")[0] for name in names if "/" in name}
    assert tops == {"recserve", "recserve.egg-info"}


def test_the_package_works_in_an_empty_folder(installed, tmp_path):
    said = run(installed, tmp_path, sys.executable, "-c", IN_THE_WHEEL, str(installed))
    assert said.strip() == "True"


def test_the_command_works_in_an_empty_folder(installed, tmp_path):
    command = str(installed / "bin" / "recserve")
    assert "recommend" in run(installed, tmp_path, sys.executable, command, "--help")
    assert run(installed, tmp_path, sys.executable, command, "--version").startswith("recserve ")
