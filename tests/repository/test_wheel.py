"""The sdist builds a wheel, and the wheel works without the checkout.

C sources, the compiled C kernels, the playground, types and the command are in it.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from recserve.kernels.native import library
from recserve.kernels.native.processor import LEVELS, best_level, instruction_set, missing_flags
from tests.support.c_results import GOLDEN, c_results, digest
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

IN_THE_WHEEL = """
import pathlib, recserve, sys
from recserve.kernels.native import library, native
home = pathlib.Path(recserve.__file__).parent
assert home.is_relative_to(sys.argv[1]), home
assert (home / "py.typed").is_file()
playground = home / "server" / "playground"
assert "<title>" in (playground / "index.html").read_text()
assert {"app.js", "base.css", "mark.svg"} <= {file.name for file in playground.iterdir()}
print(library.find_compiler() is None or native.library() is not None)
"""


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
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


def wheel_of(sdist: Path, folder: Path, **environment: str) -> Path:
    """Builds a wheel of the sdist into a folder."""
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(folder)]
    subprocess.run([*PIP, "wheel", *options, str(sdist)], check=True, env=os.environ | environment)
    (wheel,) = folder.glob("recserve-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """The wheel that this machine builds of the sdist."""
    return wheel_of(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """A folder with the content of the wheel."""
    site = wheel.with_name("site")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


def run(site: Path, folder: Path, *command: str, **changes: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, env=environment | changes, capture_output=True, text=True, timeout=300
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


def test_a_wheel_with_compiled_kernels_names_its_platform(wheel):
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none")
    if library.find_compiler() is None:
        assert (platform, libraries) == ("any", [])
        return
    assert platform.endswith(os.uname().machine) and "linux" in platform
    folder = "recserve/kernels/native/compiled"
    for level in LEVELS:
        (found,) = (name for name in libraries if library.packaged_name(level) in name)
        assert found.startswith(f"{folder}/{level}-")
    assert len(libraries) == len(LEVELS)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_wheel_fits_every_machine(sdist, tmp_path, compiler):
    wheel = wheel_of(sdist, tmp_path, CC=compiler)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.skipif(library.find_compiler() is None, reason="no C compiler here")
@pytest.mark.parametrize("level", [*LEVELS, None])
def test_packaged_kernels_need_no_compiler_and_compute_the_same(installed, tmp_path, level):
    """None stands for the best level of this machine."""
    if level is not None and missing_flags(level):
        pytest.skip(f"this processor lacks {', '.join(missing_flags(level))}")
    nothing = tmp_path / "bin"
    nothing.mkdir()
    name, bits = run(
        installed, tmp_path, sys.executable, "-m", "tests.support.c_results",
        PYTHONPATH=f"{installed}{os.pathsep}{ROOT}", PATH=str(nothing), CC="cc",
        RECSERVE_ISA=level or "",
    ).split()  # fmt: skip
    assert name.startswith(library.packaged_name(level or best_level()))
    assert not list(tmp_path.rglob("*.so"))  # nothing was compiled
    level = level or best_level()
    if level == instruction_set():
        assert bits == digest(c_results())
    assert bits == GOLDEN.get(level, bits)
