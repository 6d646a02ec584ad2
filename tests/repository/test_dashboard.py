"""The dashboard and the alert rules read metrics that a real server exports."""

import json
import re

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

from recserve.drafters.ngram import NgramDrafter
from recserve.drafters.none import NoDrafter
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.service import Service
from recserve.service.options import CatalogLogOptions, ServiceOptions
from recserve.service.text.loader import LoadedText
from recserve.service.text.model import TextModel
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.live_server import live
from tests.support.paths import ROOT
from tests.support.scripted_text import VOCABULARY, byte_tokenizer
from tests.support.tiny_bundle import shared_bundle

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/recserve.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text(encoding="utf-8"))["groups"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [*QUERIES, *(rule["expr"] for group in RULES for rule in group["rules"])]
NAME = re.compile(r"\b(?:recserve|process|python)_\w+")

ONE = {"name": "x", "use": "recommend", "arms": [{"name": "a"}, {"name": "b"}]}


def names(expression: str) -> set[str]:
    return set(NAME.findall(re.sub(r'"[^"]*"', '""', expression)))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> LoadedText:
    torch.manual_seed(3)
    decoder = DecoderConfig(32, 2, 4, 2, 8, 48, max_positions=256)
    network = LanguageModel(LanguageModelConfig(decoder, VOCABULARY)).requires_grad_(False).eval()
    drafters = {"none": NoDrafter(), "ngram": NgramDrafter(min_match=1)}
    tokenizer = TextTokenizer.open(byte_tokenizer(tmp_path_factory.mktemp("toy")))
    device = torch.device("cpu")
    model = TextModel("toy", tokenizer, VOCABULARY, (), 256, 1, device, drafters, "ngram")
    return LoadedText(network, drafters, model)


@pytest.fixture(scope="module")
def page(text, tmp_path_factory, redis_url) -> str:
    """The metrics of a server that has answered a few requests of each kind."""
    folder = tmp_path_factory.mktemp("server")
    options = ServiceOptions(text=text, catalog_log=CatalogLogOptions(redis_url, "dashboard"))
    with (
        Service.open(shared_bundle(), f"lmdb:{folder}/store", "cpu", options) as service,
        live(
            service, slate_log=folder / "slates", metrics_compat="vllm", experiments=[ONE]
        ) as client,
    ):
        item = service.samples(0, 1)["items"][0]
        history = {"history": [item]}
        for path, body in (
            ("/v1/recommend", {**history, "k": 5}),
            ("/v1/rank", {**history, "candidates": [{"item_id": item}]}),
            ("/v1/completions", {"prompt": "ab ab ab ab", "max_tokens": 40, "temperature": 0}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab ab"}]}),
        ):
            body |= {"max_tokens": 40, "temperature": 0} if "messages" in body else {}
            assert client.post(path, json=body).status_code == 200
        assert client.post("/v1/recommend", json={"k": "many"}).status_code == 422
        return client.get("/metrics").text


def test_every_metric_of_dashboard_and_alerts_has_samples(page):
    families = list(text_string_to_metric_families(page))
    there = {sample.name for family in families for sample in family.samples}
    wanted = set().union(*map(names, EXPRESSIONS))
    assert len(wanted) > 30
    assert wanted <= there, sorted(wanted - there)
    value = {s.name: s.value for f in families for s in f.samples if not s.labels}
    assert value["recserve_inter_token_seconds_count"] > 10
    assert value["recserve_text_seconds_count"] == 2
    assert "vllm:spec_decode_num_drafts_total" in there


def test_labels_of_the_queries_exist(page):
    labels = {
        name
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        for name in sample.labels
    }
    for expression in EXPRESSIONS:
        for listed in re.findall(r"by \(([^)]*)\)", expression):
            assert set(listed.replace(" ", "").split(",")) <= labels | {"instance", "le"}
