"""The pins of constraints.txt: all that the package needs, nothing that torch pins by itself."""

import re
import tomllib

from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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
