"""The pins of constraints.txt and the Python versions that the package names."""

import re
import tomllib
from importlib.metadata import distributions

from packaging.specifiers import SpecifierSet

from recserve.cli.doctor import MIN_PYTHON
from tests.support.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[\w.-]+", one)[0]) for one in requirements}


PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()


def test_every_dependency_has_one_exact_version():
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in PINS)
    assert len(names(PINS)) == len(PINS)
    extras = names(sum(PROJECT["optional-dependencies"].values(), []))
    assert names(PROJECT["dependencies"]) | extras - {"triton"} <= names(PINS)


def test_what_a_cuda_build_of_torch_pins_is_left_to_it():
    """Another version of one of these could not be installed beside it."""
    own = {name for name in names(PINS) if re.match(r"triton$|triton-|nvidia-|cuda-", name)}
    assert own == set()


def test_promised_python_versions_are_tested():
    """ruff and mypy check for the oldest; `make python-versions` runs the others."""
    classifier = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    oldest, *newer = (one[1] for one in map(classifier.fullmatch, PROJECT["classifiers"]) if one)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^PYTHONS := (.+)$", makefile, re.MULTILINE)[1].split() == newer
    assert PROJECT["requires-python"] == f">={oldest}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert ".".join(map(str, MIN_PYTHON)) == oldest


def test_pinned_packages_run_on_the_oldest_python():
    """One that needs a later patch level cannot be installed on the Python of Debian 12."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    pinned = {(normal(name), version) for name, version in (pin.split("==") for pin in PINS)}
    refused = {
        found.name: needed
        for found in distributions()
        if (normal(found.name), found.version) in pinned
        and (needed := found.metadata["Requires-Python"])
        and not SpecifierSet(needed).contains(oldest)
    }
    assert not refused
