"""The tables of `make mutants` fit the code: files and tests exist, and anchors are found once."""

import tomllib
from collections import Counter

import pytest

from tests.support.paths import ROOT

HERE = ROOT / "tests" / "mutants"
PROMISES = tomllib.loads((HERE / "promises.toml").read_text(encoding="utf-8"))["promise"]
BY_HAND = tomllib.loads((HERE / "by_hand.toml").read_text(encoding="utf-8"))["mutant"]
SURVIVORS = tomllib.loads((HERE / "survivors.toml").read_text(encoding="utf-8"))["survivor"]


@pytest.mark.parametrize("name", PROMISES)
def test_files_and_tests_of_a_promise_exist(name):
    promise = PROMISES[name]
    missing = [file for file in promise["files"] if not (ROOT / file).is_file()]
    for test in promise["tests"]:
        path, *names = test.partition("[")[0].split("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not all(f"def {name}(" in text for name in names) or not text:
            missing.append(test)
    assert missing == []


@pytest.mark.parametrize("mutant", BY_HAND, ids=lambda mutant: mutant["name"])
def test_a_mutant_made_by_hand_changes_one_place(mutant):
    assert mutant["file"] in PROMISES[mutant["promise"]]["files"]
    text = (ROOT / mutant["file"]).read_text(encoding="utf-8")
    for old, new in zip(mutant["old"], mutant["new"], strict=True):
        assert text.count(old) == 1 and old != new


def test_names_and_reasons_are_single():
    assert max(Counter(mutant["name"] for mutant in BY_HAND).values()) == 1
    reasons = Counter((s["file"], s["old"], s["new"]) for s in SURVIVORS)
    assert not reasons or max(reasons.values()) == 1
