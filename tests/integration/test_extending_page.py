"""The examples of docs/guides/extending.md, installed as the package that the page describes."""

import re
import sys
import tomllib

import pytest
import torch

from recserve.features.history.history import StoredEvent, StoreOptions
from recserve.features.history.stores import open_store
from recserve.kernels.tree import from_parents
from recserve.schemas.items import RecommendRequest
from recserve.search.strategy import strategy_classes
from recserve.service import Service
from recserve.speculation.draft import Budget
from recserve.speculation.drafter import TextContext
from recserve.speculation.drafters.registry import drafter_classes
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.verifier import ScoredTrees
from recserve.speculation.verifiers import registry as rules
from tests.support.paths import ROOT
from tests.support.tiny_bundle import shared_bundle

PAGE = (ROOT / "docs" / "guides" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
PROJECT = tomllib.loads(FILES.pop("pyproject.toml"))["project"]


def forget_plugins() -> None:
    for cached in (drafter_classes, strategy_classes, rules.verifiers):
        cached.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The files of the page on the path, with the entry points of its pyproject.toml."""
    site = tmp_path / "site"
    info = site / f"{PROJECT['name']}-{PROJECT['version']}.dist-info"
    info.mkdir(parents=True)
    for name, text in FILES.items():
        (site / name).write_text(text)
    lines = []
    for group, entries in PROJECT["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    about = f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n"
    (info / "METADATA").write_text(about)
    monkeypatch.syspath_prepend(site)
    forget_plugins()
    yield
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)
    monkeypatch.undo()
    forget_plugins()


def test_the_page_has_a_file_for_each_entry_point():
    groups = PROJECT["entry-points"]
    assert sorted(groups) == [
        f"recserve.{g}" for g in ("drafters", "stores", "strategies", "verifiers")
    ]
    modules = {value.partition(":")[0] for group in groups.values() for value in group.values()}
    assert {f"{module}.py" for module in modules} == set(FILES)


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
        ids = service.runtime.snapshot.catalog.items.ids
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
