"""The examples of docs/guides/extending.md, each built and installed as a package of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recserve.drafters.registry import drafter_classes
from recserve.features.history.history import StoredEvent, StoreOptions
from recserve.features.history.stores import open_store
from recserve.kernels.tree import from_parents
from recserve.schemas.items import RecommendRequest
from recserve.search.strategy import strategy_classes
from recserve.service import Service
from recserve.speculation.draft import Budget
from recserve.speculation.drafter import TextContext
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.verifier import ScoredTrees
from recserve.speculation.verifiers import registry as rules
from tests.support.paths import ROOT
from tests.support.tiny_bundle import shared_bundle

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "guides" / "extending.md").read_text(encoding="utf-8")
CODE = dict(re.findall(r"^```python\n# (acme-\w+/\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
DRAFTER = "acme-drafter/pyproject.toml"
(PROJECT,) = re.findall(rf"^```toml\n# {DRAFTER}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
OTHERS = re.findall(
    r"^```toml\n# in acme-(\w+)/pyproject.toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)


def forget_plugins() -> None:
    for cached in (drafter_classes, strategy_classes, rules.verifiers):
        cached.cache_clear()


def write_packages(folder: Path) -> list[Path]:
    """Writes the packages of the page. All but the drafter's differ from it as the page says."""
    for name, text in CODE.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    (folder / DRAFTER).write_text(PROJECT)
    entry_points = PROJECT[PROJECT.index("[project.entry") : PROJECT.index("[tool")]
    for name, own in OTHERS:
        text = PROJECT.replace(entry_points, own + "\n").replace("drafter", name)
        (folder / f"acme-{name}" / "pyproject.toml").write_text(text)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder into which pip has built and installed each package."""
    packages = write_packages(tmp_path_factory.mktemp("packages"))
    site = tmp_path_factory.mktemp("site")
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *how, *map(str, packages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.fixture
def installed(site, monkeypatch):
    """The installed packages on the path."""
    monkeypatch.syspath_prepend(site)
    forget_plugins()
    yield
    for name in CODE:
        sys.modules.pop(Path(name).stem, None)
    monkeypatch.undo()
    forget_plugins()


def test_the_drafter_proposes_within_its_budget(installed):
    drafter = drafter_classes()["repeat"]()
    params, speculation = SamplingParams(), Speculation("repeat")
    contexts = [
        TextContext(i, tokens, len(tokens), params, speculation)
        for i, tokens in enumerate(([5, 6, 7, 8], [5]))
    ]
    long, short = drafter.propose(contexts, [Budget(8, 2), Budget(8, 8)])
    assert long.tokens.tolist() == [7, 8] and short.tokens.tolist() == [5]


def test_the_rule_follows_the_likeliest_tokens(installed):
    tree = from_parents(torch.tensor([9, 4, 2]), torch.tensor([-1, 0, 1]))
    logits = torch.zeros(3, 10)
    logits[0, 4] = logits[1, 6] = 1.0
    numbers = torch.tensor([0])
    scored = ScoredTrees(tree, 2, lambda nodes: logits[nodes], numbers, numbers + 5, 10)
    accepted = rules.verifiers()["likeliest"].verify(scored)
    assert accepted.lengths.tolist() == [1] and accepted.bonus.tolist() == [6]


def test_the_strategy_is_served(installed, tmp_path):
    with Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu") as service:
        ids = service.catalog.current.catalog.items.ids
        answer = service.recommend(
            RecommendRequest(history=list(ids[:3]), k=4, strategy="first_items")
        )
    assert [item.item_id for item in answer.items] == list(ids[3:7]) and not answer.exact


def test_the_store_keeps_and_deletes_histories(installed):
    store = open_store("memory:here", StoreOptions(cap=2))
    events = [StoredEvent(item_key=7, time_us=time, event_key=time) for time in (1, 2)]
    assert store.append("u", events) == [True, True]
    assert store.get("u")["event_key"].tolist() == [1, 2]
    assert store.delete("u") and not store.get("u").size
