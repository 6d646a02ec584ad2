"""No loader leaves out a tensor of its files without a word.

A language model is compared with transformers, whatever its files hold. All other loaders get a
tensor more, or a changed copy of one that they do not need.
"""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from recserve.bundle.bundle import CATALOG, VECTORS, Bundle
from recserve.features.catalog.catalog import Catalog
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.vectors.item_graph import ItemLinks, link_items
from recserve.features.vectors.quantizer import fit_quantizer, load_quantizer
from recserve.features.vectors.text_encoder import TextEncoder
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.dense_retriever import load_retriever
from recserve.models.drafters.mask_tokens_files import save_mask_tokens
from recserve.models.history_bonus import HistoryBonus, load_history_bonus
from recserve.models.item_heads import load_self_draft
from recserve.models.loading import UnsupportedModel, load_language_model
from recserve.models.ranker import load_ranker
from recserve.models.recommender import Recommender, load_recommender, save_recommender
from recserve.models.sasrec import SasRec, SasRecConfig, load_sasrec, save_sasrec
from recserve.speculation.drafters.registry import build_drafter
from tests.support.drafter_folders import uneven_model, write_drawn
from tests.support.mask_tokens_drafter import mask_network
from tests.support.model_folders import drawn
from tests.support.tiny_bundle import shared_bundle, with_models

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DRAFTERS = {
    **{kind: kind for kind in ("mtp", "medusa", "specformer", "mask_tokens")},
    **{"eagle-1": "eagle", "eagle-3": "eagle", "dflash": "block", "dspark": "block"},
}
FULL: list[Path] = []  # a bundle that has every model
TOKENS = torch.tensor([[1, 5, 9, 4, 60, 0, 33]])


def logits_of(model):
    return model.logits(model(TOKENS[0], torch.arange(TOKENS.shape[1]), DenseAttention()))


def write_shards(folder, weights, placed, listed):
    """Writes tensors by file, and an index that names `listed` and no others."""
    for file in set(placed.values()):
        save_file({n: weights[n] for n, own in placed.items() if own == file}, folder / file)
    if listed is not None:
        (folder / INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": {n: placed[n] for n in listed}})
        )


@pytest.mark.parametrize("seed", range(12))
def test_a_language_model_equals_transformers_or_is_refused(seed, tmp_path):
    """Draws the family, the head, a further tensor, the number of files, and what an index names.

    transformers reads all tensors of the files that an index names.
    """
    draw = random.Random(seed)
    family = draw.choice(["llama", "llama-tied", "qwen2", "qwen3"])
    drawn(tmp_path, family, seed)
    weights = load_file(tmp_path / WEIGHTS)
    fields = json.loads((tmp_path / "config.json").read_text())
    head = ("own", "copy", "none")[seed % 3]
    weights.pop(HEAD, None)
    if head != "none":
        weights[HEAD] = weights[EMBEDDING].flip(0) if head == "own" else weights[EMBEDDING].clone()
    fields["tie_word_embeddings"] = head == "none" or draw.random() < 0.7
    further = draw.choice(
        ["", "rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"]
        + ["extra.lm_head.weight", "model.layers.3.mlp.up_proj.weight", "model.scale"]
    )
    if further:
        weights[further] = torch.randn(4)
    files = [WEIGHTS] if draw.random() < 0.3 else ["a.safetensors", "b.safetensors"]
    placed = {name: draw.choice(files) for name in sorted(weights)}
    unnamed = HEAD if head != "none" and len(files) > 1 and draw.random() < 0.3 else None
    listed = [name for name in placed if name != unnamed] if len(files) > 1 else None
    (tmp_path / WEIGHTS).unlink()
    write_shards(tmp_path, weights, placed, listed)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if refused := unnamed or (further if "inv_freq" not in further else ""):
        with pytest.raises(UnsupportedModel, match=refused):
            load_language_model(tmp_path)
        return
    model = load_language_model(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), theirs(TOKENS).logits[0], atol=1e-4, rtol=1e-4)
    assert model.config.tied == (head != "own" and fields["tie_word_embeddings"])


def test_weights_in_one_file_and_in_shards_are_one_too_many(tmp_path):
    drawn(tmp_path, "llama")
    weights = load_file(tmp_path / WEIGHTS)
    write_shards(tmp_path, weights, dict.fromkeys(weights, "a.safetensors"), weights)
    with pytest.raises(UnsupportedModel, match=f"both {WEIGHTS} and {INDEX}"):
        load_language_model(tmp_path)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", "mtp", "dflash"])
@pytest.mark.parametrize("type_", ["gemma2", "", "Llama", "llama4", 3])
def test_a_draft_network_of_an_unknown_type_is_refused(kind, type_, tmp_path):
    """Its layers may be others with tensors of the same names."""
    path = write_drawn(kind, tmp_path) / "config.json"
    fields = json.loads(path.read_text()) | {"model_type": type_}
    path.write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match=f"model_type is {type_!r}; layers of llama, qwen2"):
        build_drafter(DRAFTERS[kind], uneven_model(), [tmp_path])
    for fine in ("phi3", "mistral", None):
        path.write_text(json.dumps(fields | {"model_type": fine}))
        build_drafter(DRAFTERS[kind], uneven_model(), [tmp_path])


COPIES = {
    "eagle-1": {"embed_tokens.weight": "embedding", HEAD: "head"},
    "eagle-3": {"embed_tokens.weight": "embedding"},
    "mtp": {EMBEDDING: "embedding", "model.norm.weight": "norm", HEAD: "head"},
    "medusa": {HEAD: "head"},
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in COPIES for name in COPIES[kind]]
)
def test_a_tensor_of_the_target_in_a_drafter_is_a_copy(kind, name, tmp_path):
    """Rounded to 16 bits it is one; a single number that differs by 2 % is none."""
    target = uneven_model()
    own = {
        "embedding": target.tokens.weight,
        "norm": target.decoder.norm.weight,
        "head": target.head.weight,
    }[COPIES[kind][name]]
    (file,) = write_drawn(kind, tmp_path).glob("*.safetensors")
    weights = load_file(file)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        save_file(weights | {name: own.detach().to(dtype).clone()}, file)
        build_drafter(DRAFTERS[kind], target, [tmp_path])
    other = own.detach().clone()
    number = random.Random(kind + name).randrange(other.numel())
    other.view(-1)[number] = 1.02 * other.view(-1)[number] + 1e-3
    save_file(weights | {name: other}, file)
    with pytest.raises(UnsupportedModel, match=f"{name} differs from that of the target"):
        build_drafter(DRAFTERS[kind], target, [tmp_path])


def test_heads_of_medusa_lie_in_one_place(tmp_path):
    file = write_drawn("medusa", tmp_path) / "medusa_lm_head.safetensors"
    heads = {f"medusa_head.{name}": tensor + 1 for name, tensor in load_file(file).items()}
    save_file({HEAD: uneven_model().head.weight.detach().clone()}, tmp_path / WEIGHTS)
    build_drafter("medusa", uneven_model(), [tmp_path])
    save_file(heads, tmp_path / WEIGHTS)
    with pytest.raises(UnsupportedModel, match=f"heads in {file.name} and in {WEIGHTS}"):
        build_drafter("medusa", uneven_model(), [tmp_path])


def drafter(kind):
    def write(folder):
        if kind == "mask_tokens":
            save_mask_tokens(mask_network(uneven_model()), folder)
        else:
            write_drawn(kind, folder)
        return lambda: build_drafter(DRAFTERS[kind], uneven_model(), [folder])

    return write


def recommender(**more):
    def write(folder):
        config = RecommenderConfig(DecoderConfig(16, 1, 2, 1, 8, 32), (4, 4), **more)
        save_recommender(Recommender(config), folder)
        return lambda: load_recommender(folder)

    return write


def sasrec(folder):
    save_sasrec(SasRec(SasRecConfig(9, 8, num_heads=2)), folder)
    return lambda: load_sasrec(folder)


def language_model(folder):
    drawn(folder, "llama")
    return lambda: load_language_model(folder)


def bonus(folder):
    links = torch.ones(1).numpy()
    offsets = torch.tensor([0, 1, 1]).numpy()
    HistoryBonus(offsets, torch.tensor([1], dtype=torch.int32).numpy(), links, 0.5).save(folder)
    return lambda: load_history_bonus(folder, 2)


def quantizer(kind):
    def write(folder):
        vectors = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).numpy()
        fit_quantizer(kind, vectors, (4, 4), 0).save(folder)
        return lambda: load_quantizer(folder)

    return write


def graph(folder):
    path = folder / "item_graph.safetensors"
    codes = torch.cartesian_prod(torch.arange(4), torch.arange(4)).numpy()
    link_items(codes, [torch.randn(4, 3).numpy() for _ in range(2)]).save(path)
    return lambda: ItemLinks.load(path)


def bundled(part):
    """A part of a bundle that has every model."""

    def write(folder):
        bundle = Bundle.open(FULL[0])
        catalog = bundle.catalog()
        model = load_recommender(bundle.directory("recommender"))
        if part == "vectors":
            shutil.copy(bundle.root / VECTORS, folder)
            return lambda: Catalog.load(bundle.path(CATALOG), folder / VECTORS, "")
        shutil.copytree(bundle.directory(part), folder, dirs_exist_ok=True)
        return {
            "retriever": lambda: load_retriever(folder, model),
            "drafters/nezha": lambda: load_self_draft(folder, model),
            "text": lambda: TextEncoder.load(folder),
            "ranker": lambda: (
                load_ranker(folder, catalog.vectors),
                RankingTables.load(folder, catalog.items, catalog.vectors),
            ),
        }[part]

    return write


@pytest.fixture(scope="module", autouse=True)
def full_bundle(tmp_path_factory):
    folder = Path(shutil.copytree(shared_bundle(), tmp_path_factory.mktemp("full") / "b"))
    FULL.append(with_models(folder, every_strategy=True))
    yield
    FULL.clear()


LOADERS = {
    "language model": language_model,
    **{kind: drafter(kind) for kind in DRAFTERS},
    "recommender": recommender(normalization="vocabulary", input="codes"),
    "recommender, tied": recommender(tied=True),
    "sasrec": sasrec,
    "history bonus": bonus,
    "residual quantizer": quantizer("residual"),
    "product quantizer": quantizer("product"),
    "item graph": graph,
    **{
        part: bundled(part) for part in ("retriever", "drafters/nezha", "ranker", "text", "vectors")
    },
}
NAMES = ("extra", "head.weight", HEAD, "x.lm_head.weight", "level_2", "norm.bias", "x.inv_freq")


@pytest.mark.parametrize("name", LOADERS)
def test_a_tensor_that_no_place_is_for_is_refused_by_name(name, tmp_path):
    load = LOADERS[name](tmp_path)
    load()
    draw = random.Random(name)
    for file in sorted(tmp_path.rglob("*.safetensors")):
        weights = load_file(file)
        for extra in draw.sample([n for n in NAMES if n not in weights], 4):
            save_file(weights | {extra: torch.randn(3)}, file)
            with pytest.raises(ValueError, match=extra.replace(".", r"\.")):
                load()
        save_file(weights, file)
        load()
