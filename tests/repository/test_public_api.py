"""What users and other programs rely on changes only on purpose: the snapshot is edited with it."""

from tests.support.paths import ROOT
from tests.support.public_api import public_api


def test_the_public_api_is_the_snapshot():
    expected = (ROOT / "tests" / "repository" / "public_api.txt").read_text().splitlines()
    found = public_api()
    gone, new = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    advice = (
        "if that is meant: python -m tests.support.public_api > tests/repository/public_api.txt"
    )
    assert not gone and not new, f"gone: {gone}; new: {new}; {advice}"
    assert expected == found
