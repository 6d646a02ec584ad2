"""The examples of the guide to experiments are valid settings."""

import re

import yaml

from recserve.experiments.settings import parse_experiments
from tests.support.paths import ROOT

BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_settings_of_the_page_are_valid():
    page = (ROOT / "docs/guides/live-experiments.md").read_text(encoding="utf-8")
    found = [yaml.safe_load(block) for block in BLOCK.findall(page)]
    given = [one["experiments"] for one in found if "experiments" in one]
    parsed = [parse_experiments(one) for one in given]
    assert [[one.name for one in file] for file in parsed] == [["search", "drafts"], ["versions"]]
    assert parsed[1][0].arms[1].url == "http://127.0.0.1:8081"
