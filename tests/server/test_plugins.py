"""Drafters and acceptance rules that another distribution registers by entry points."""

import pytest
import torch

from recserve.core.plugins import PluginError
from recserve.drafters.registry import build_drafter, drafter_classes
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.service.service import Service
from recserve.service.text.loader import open_drafters
from recserve.service.text.model import TextModel
from recserve.speculation.verifiers import registry
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.live_server import live
from tests.support.scripted_text import VOCABULARY, byte_tokenizer

MODULE = '''"""A drafter and an acceptance rule of another distribution."""

import torch

from recserve.speculation.draft import chain_draft, empty_draft
from recserve.speculation.drafter import Drafter
from recserve.speculation.verifiers.sample import SampleRule


class RepeatDrafter(Drafter):
    """Drafts that the text before the last three tokens comes again."""

    name = "repeat"

    def propose(self, contexts, budgets):
        return [self.draft(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def draft(self, context, budget):
        length = min(budget.num_nodes, budget.depth, 3, len(context.tokens))
        if not length:
            return empty_draft()
        return chain_draft(torch.tensor(context.tokens[-length:]))


class CarefulRule(SampleRule):
    """The default rule under another name."""

    name = "careful"
'''
DRAFTER = "[recserve.drafters]\nrepeat = other_drafters:RepeatDrafter\n"
RULE = "[recserve.verifiers]\ncareful = other_drafters:CarefulRule\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution onto the path, as pip leaves it in site-packages."""

    def put(entries: str) -> None:
        (tmp_path / "other_drafters.py").write_text(MODULE)
        info = tmp_path / "other_drafters-1.2.dist-info"
        info.mkdir()
        about = "Metadata-Version: 2.1\nName: other-drafters\nVersion: 1.2\n"
        (info / "METADATA").write_text(about)
        (info / "entry_points.txt").write_text(entries)
        monkeypatch.syspath_prepend(tmp_path)
        clear()

    def clear() -> None:
        for cached in (drafter_classes, registry.verifiers):
            cached.cache_clear()

    yield put
    monkeypatch.undo()
    clear()


def tiny_network() -> LanguageModel:
    torch.manual_seed(3)
    decoder = DecoderConfig(32, 2, 4, 2, 8, 48, max_positions=700)
    return LanguageModel(LanguageModelConfig(decoder, VOCABULARY)).requires_grad_(False).eval()


def test_a_drafter_and_a_rule_of_another_distribution_serve_the_same_text(install, tmp_path):
    install(DRAFTER + RULE)
    assert len(MODULE.splitlines()) < 100
    network = tiny_network()
    drafters = open_drafters(("none",), network)
    assert list(drafters) == ["none", "ngram", "suffix", "lookahead", "repeat"]
    engine = build_engine(
        EngineModels(text=network, drafters=drafters),
        EngineConfig(kv_bytes=2**24, load_aware=False),
    )
    engine.start()
    tokenizer = TextTokenizer.open(byte_tokenizer(tmp_path))
    cpu = torch.device("cpu")
    model = TextModel("toy", tokenizer, VOCABULARY, (), 700, 1, cpu, drafters)
    with live(Service(engine, model.device, text=model)) as client:
        answers = {}
        for drafter in ("none", "repeat", "repeat+suffix"):
            for verifier in ("sample", "careful"):
                body = {"prompt": "one two", "max_tokens": 40, "seed": 5, "temperature": 0.3}
                body["speculation"] = {"drafter": drafter, "verifier": verifier}
                answers[drafter, verifier] = client.post("/v1/completions", json=body)
        listed = client.get("/v1/models").json()["data"][0]["recserve"]
    refused = [answers.pop(key) for key in list(answers) if "+" in key[0]]
    assert {answer.status_code for answer in refused} == {400}, "not built on a request's word"
    assert {answer.status_code for answer in answers.values()} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers.values()}) == 1
    assert "repeat" in listed["drafters"] and "careful" in listed["verifiers"]


@pytest.mark.parametrize(
    "entries,message",
    [
        ("repeat = other_drafters:Missing", "cannot be loaded: AttributeError"),
        ("repeat = other_drafters:CarefulRule", "not a class derived from Drafter"),
        ("other = other_drafters:RepeatDrafter", "the class has name = 'repeat'"),
        ("suffix = other_drafters:RepeatDrafter", "the name 'suffix' is already taken"),
    ],
)
def test_a_broken_plugin_names_its_distribution(install, entries, message):
    install(f"[recserve.drafters]\n{entries}\n")
    with pytest.raises(PluginError, match=f"plugin of other-drafters: .*{message}"):
        build_drafter("none", tiny_network())
