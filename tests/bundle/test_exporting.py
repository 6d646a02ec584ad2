"""`recserve bundle export`: what a stranger makes of the folder alone equals what we answer."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from recserve.bundle import exporting
from recserve.bundle.bundle import Bundle, BundleError
from recserve.bundle.exporting import export_llama
from recserve.cli.app import app
from recserve.core.request import Prefix, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.kernels.trie.trie import build_trie
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender, load_recommender, save_recommender
from tests.support.tiny_bundle import shared_bundle, tiny_bundle

WIDTH = 8


@pytest.fixture(scope="module", params=[False, True], ids=["own-head", "tied"])
def bundle(request, tmp_path_factory):
    path = tiny_bundle(tmp_path_factory.mktemp("codes"), ranker=False, recommender=False)
    opened = Bundle.open(path)
    sizes = opened.catalog().semantic_ids.codebook_sizes
    torch.manual_seed(1)
    config = RecommenderConfig(
        DecoderConfig(32, 2, 4, 2, 8, 64),
        sizes,
        input="codes",
        normalization="vocabulary",
        tied=request.param,
        max_history_items=16,
    )
    model = Recommender(config)
    for weight in model.parameters():
        weight.data += 0.2 * torch.randn(weight.shape)
    save_recommender(model, opened.directory("recommender"))
    opened.commit("recommender", {})
    return Bundle.open(path)


def test_transformers_alone_gives_our_slates(bundle, tmp_path):
    result = CliRunner().invoke(
        app, ["bundle", "export", str(bundle.root), "--format", "hf", "--out", str(tmp_path / "hf")]
    )
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "hf/config.json").read_text())
    table = pq.read_table(tmp_path / "hf/items.parquet").to_pydict()
    items = dict(zip(table["item_id"], table["tokens"], strict=True))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()

    catalog = bundle.catalog()
    model = load_recommender(bundle.directory("recommender"))
    trie = build_trie(
        torch.from_numpy(catalog.semantic_ids.codes.astype(np.int64)),
        catalog.semantic_ids.codebook_sizes,
    )
    following: dict[tuple[int, ...], set[int]] = {}
    for tokens in items.values():
        for level, token in enumerate(tokens):
            following.setdefault(tuple(tokens[:level]), set()).add(token)
    for seed in range(3):
        rows = np.random.default_rng(seed).integers(0, len(catalog), 5 + seed)
        history = [catalog.items.ids[row] for row in rows]
        prompt = [config["bos_token_id"], *(t for item in history for t in items[item])]
        start = len(prompt)
        with torch.inference_mode():
            out = theirs.generate(
                torch.tensor([prompt]),
                num_beams=WIDTH,
                num_return_sequences=WIDTH,
                max_new_tokens=len(catalog.semantic_ids.codebook_sizes),
                prefix_allowed_tokens_fn=lambda _, ids, n=start: sorted(
                    following[tuple(ids[n:].tolist())]
                ),
                length_penalty=0.0,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        by_tokens = {tuple(tokens): item for item, tokens in items.items()}
        expected = [by_tokens[tuple(row[start:].tolist())] for row in out.sequences]
        tokens = model.template.tokens(rows, catalog.semantic_ids.codes)
        root = Prefix(NodeInputs(torch.from_numpy(tokens)), tokens)
        assert tokens.tolist() == prompt
        slate = build_engine(EngineModels(model)).run(
            SlateQuery(prefix=root, trie=trie, k=WIDTH, beam_width=WIDTH)
        )
        assert [catalog.items.ids[row] for row in slate.rows] == expected
        np.testing.assert_allclose(slate.scores, out.sequences_scores.numpy(), atol=1e-4)


def test_what_a_llama_cannot_say_is_refused(tmp_path):
    with pytest.raises(BundleError, match="--input codes"):
        export_llama(Bundle.open(shared_bundle()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_export_leaves_nothing(bundle, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(exporting, "save_language_model", fail)
    with pytest.raises(OSError, match="disk full"):
        export_llama(bundle, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(bundle, tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(FileExistsError, match="not empty"):
        export_llama(bundle, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine"]
