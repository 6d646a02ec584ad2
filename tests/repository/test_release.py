"""What a release names: one version, and papers that the code names too."""

import re
import tomllib
from importlib.metadata import version

import yaml

import recserve
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_place_names_one_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    chart = yaml.safe_load((ROOT / "deploy/helm/recserve/Chart.yaml").read_text("utf-8"))
    named = PROJECT["version"], cited["version"], chart["appVersion"], recserve.__version__
    assert set(named) == {version("recserve")}
    assert cited["license"] == PROJECT["license"]


def test_the_cited_papers_are_sources_of_the_code():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    code = "".join(path.read_text("utf-8") for path in (ROOT / "recserve").rglob("*.py"))
    for paper in cited:
        assert paper["title"] and paper["authors"] and paper["year"]
        assert re.search(r"\d{4}\.\d{5}$", paper["url"])[0] in code, paper["title"]
