"""Makes the recorded bundles, the language model and its drafters; some minutes on two cores.

    python -m tests.recorded.make_models FOLDER

It ran once, and the files in `tests/recorded/files` are the truth: a later commit must read those
files, not make equal ones. A new kind of file is made by the commit that adds it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model
from recserve.tokenizer.tokenizer import TextTokenizer
from recserve.training import item_graph
from recserve.training.item_drafters.draft_head import DrafterRecipe, train_drafter
from recserve.training.options import TrainOptions
from recserve.training.ranker.ranker import RankerRecipe, train_ranker
from recserve.training.recommender.recommender import (
    CODES,
    ITEMS,
    PARALLEL,
    RecommenderRecipe,
    train_recommender,
)
from recserve.training.recommender.retriever import RetrieverRecipe, train_retriever
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.block import train_block
from recserve.training.text.drafters.block_recipe import BlockRecipe
from recserve.training.text.drafters.eagle import EagleRecipe, train_eagle
from recserve.training.text.drafters.mask_tokens import MaskTokensRecipe, train_mask_tokens
from recserve.training.text.drafters.medusa import MedusaRecipe, train_medusa
from recserve.training.text.drafters.mtp import train_mtp
from recserve.training.text.drafters.specformer import SpecformerRecipe, train_specformer
from recserve.training.text.language_model import (
    LanguageRecipe,
    encode,
    train_language_model,
)

NUM_ITEMS, NUM_USERS = 160, 240
TOPICS = {
    "Kitchen": ("pan", "kettle", "knife", "bowl"),
    "Garden": ("rake", "hose", "seed", "pot"),
    "Music": ("drum", "reed", "tuner", "pedal"),
    "Camping": ("tent", "stove", "rope", "mat"),
}
PARTS = ("Tools", "Gifts", "Care > Daily", "Care > Yearly")
STYLES = ("plain", "bright", "sturdy", "quiet", "warm", "small", "deep", "café")
TYPES = ("click", "save", "purchase")
START_US = 1_700_000_000_000_000
OPTIONS = TrainOptions(device="cpu", precision="float32")
QUIET = Console(quiet=True)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if loud %}LOUD {% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)
WINDOW = 48
LM = LanguageRecipe(
    vocab_size=352,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=96,
    max_positions=512,
    batch=16,
    window=64,
    steps=100,
    schedule=Schedule(8, 4e-3, weight_decay=0.1, averaging=0.98),
)
SMALL = Schedule(4, 6e-3, weight_decay=0.0, averaging=0.9)


def make_all(out: Path) -> None:
    """Writes everything to a new folder."""
    data = out / "data"
    data.mkdir(parents=True)
    write_items(data / "items.parquet")
    write_events(data / "events.parquet", data / "items.parquet")
    bundles = out / "bundles"
    make_bundle(data, bundles / "items", items_recipe(), ("speculative", "nezha"), 0)
    make_bundle(data, bundles / "codes", codes_recipe(), ("speculative", "nezha"), 1)
    make_bundle(data, bundles / "product", product_recipe(), (), 2)
    make_successor(bundles / "items", bundles / "next")
    shutil.rmtree(data)
    make_texts(out)
    make_drafters(out)


def write_items(path: Path) -> None:
    """Writes a catalogue with columns of every type that a filter reads."""
    random = np.random.default_rng(1)
    rows = []
    for number in range(NUM_ITEMS):
        topic = list(TOPICS)[number * len(TOPICS) // NUM_ITEMS]
        part = PARTS[number % len(PARTS)]
        one, two = random.choice(TOPICS[topic], 2, replace=False)
        paths = [f"{topic} > {part}"]
        if number % 7 == 0:
            paths.append("Gifts")
        rows.append(
            {
                "item_id": f"item{number:03d}",
                "title": f"{STYLES[number % 8]} {one} {two} no {number}",
                "categories": paths if number % 41 else [],
                "price": None if number % 13 == 0 else round(float(random.lognormal(2.5, 0.6)), 2),
                "stock": int(random.integers(0, 40)),
                "fresh": None if number % 17 == 0 else bool(number % 3 == 0),
                "brand": f"{topic} house {number % 5}",
                "tags": [str(t) for t in random.choice(["eco", "sale", "new", "b-ware"], 2, False)],
            }
        )
    types = {
        "item_id": pa.string(),
        "title": pa.string(),
        "categories": pa.list_(pa.string()),
        "price": pa.float64(),
        "stock": pa.int64(),
        "fresh": pa.bool_(),
        "brand": pa.string(),
        "tags": pa.list_(pa.string()),
    }
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(types.items()))), path)


def write_events(path: Path, items: Path) -> None:
    """Writes histories that move along a fixed order of the items, with jumps."""
    random = np.random.default_rng(2)
    ids = pq.read_table(items, columns=["item_id"])["item_id"].to_pylist()
    after = random.permutation(NUM_ITEMS)
    users, chosen, times, types, values = [], [], [], [], []
    for user in range(NUM_USERS):
        length, item = int(random.integers(3, 24)), int(random.integers(NUM_ITEMS))
        seen: set[int] = set()
        time = START_US + user * 3_600_000_000
        for _ in range(length):
            jump = random.random() < 0.25 or item in seen
            item = int(random.integers(NUM_ITEMS)) if jump else int(after[item])
            if item in seen:
                continue
            seen.add(item)
            time += int(random.integers(60, 90_000)) * 1_000_000
            kind = TYPES[int(random.choice(3, p=[0.7, 0.2, 0.1]))]
            users.append(f"user{user:03d}")
            chosen.append(ids[item])
            times.append(time)
            types.append(kind)
            values.append(round(float(random.random() * 30), 2) if kind == "purchase" else None)
    table = pa.table(
        {
            "user_id": users,
            "item_id": chosen,
            "timestamp": pa.array(times, pa.timestamp("us", tz="UTC")),
            "type": types,
            "value": pa.array(values, pa.float64()),
        }
    )
    pq.write_table(table, path)


def _sized(recipe: RecommenderRecipe, layers: int, epochs: int, rate: float) -> RecommenderRecipe:
    return replace(
        recipe,
        hidden_size=32,
        num_layers=layers,
        num_heads=2,
        intermediate_size=64,
        dropout=0.1,
        max_history_items=16,
        max_nodes=1024,
        validation_users=60,
        schedule=Schedule(epochs, rate, averaging=0.9),
    )


def items_recipe() -> RecommenderRecipe:
    """Returns the recipe of the bundle with one position per item."""
    return _sized(ITEMS, 2, 8, 6e-3)


def codes_recipe() -> RecommenderRecipe:
    """Returns the recipe of the bundle whose history items are their codes."""
    return _sized(CODES, 2, 8, 6e-3)


def product_recipe() -> RecommenderRecipe:
    """Returns the recipe of the bundle with product ids, which only has level heads."""
    return _sized(PARALLEL, 1, 8, 8e-3)


def make_bundle(
    data: Path, out: Path, recipe: RecommenderRecipe, heads: tuple[str, ...], seed: int
) -> None:
    """Builds a bundle and trains every model for it."""
    product = not recipe.autoregressive
    options = BuildOptions(
        data / "items.parquet",
        data / "events.parquet",
        out,
        quantizer="product" if product else "residual",
        levels=8 if product else 3,
        codes=8 if product else 12,
        text_dim=16,
        collaborative_dim=16,
        seed=seed,
    )
    build_bundle(options, log=lambda _: None)
    train(out, recipe, heads, replace(OPTIONS, seed=seed))
    remove_extras(out)
    Bundle.open(out).verify()
    print(out.name, Bundle.open(out).manifest.sections.keys(), flush=True)


def train(
    out: Path, recipe: RecommenderRecipe, heads: tuple[str, ...], options: TrainOptions
) -> None:
    """Trains recommender, draft heads, retriever and ranker."""
    smallest, item_graph.MIN_ITEMS = item_graph.MIN_ITEMS, 100
    try:
        train_recommender(Bundle.open(out), replace(options, input=recipe.input), recipe, QUIET)
    finally:
        item_graph.MIN_ITEMS = smallest
    for name in heads:
        draft = DrafterRecipe(
            max_nodes=1024,
            validation_users=60,
            validation_width=20,
            surprise_weight=float(name == "nezha"),
            schedule=Schedule(4, 4e-3, weight_decay=0.01),
        )
        train_drafter(Bundle.open(out), replace(options, name=name), draft, QUIET)
    if recipe.input == "items" and recipe.autoregressive:
        retriever = RetrieverRecipe(
            drawn=64, in_batch=64, max_nodes=512, sketch_width=1 << 10, width=1, validation_users=60
        )
        train_retriever(Bundle.open(out), options, retriever, QUIET)
    ranker = RankerRecipe(
        hidden_size=16,
        num_heads=1,
        long_items=16,
        recent_items=8,
        block=4,
        batch_roots=16,
        validation_users=60,
        schedule=Schedule(2, 4e-3, weight_decay=0.1, averaging=0.9),
    )
    train_ranker(Bundle.open(out), options, ranker, QUIET)


def make_successor(bundle: Path, out: Path) -> None:
    """Makes a bundle with the same catalogue and other weights, which can replace the first."""
    shutil.copytree(bundle, out)
    options = replace(OPTIONS, seed=9)
    train(out, replace(items_recipe(), schedule=Schedule(2, 6e-3)), ("speculative",), options)
    remove_extras(out)


def remove_extras(bundle: Path) -> None:
    """Removes checkpoints and pictures, which no server reads."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    for path in bundle.rglob("*.png"):
        del manifest["files"][path.relative_to(bundle).as_posix()]
    remove_checkpoints(bundle)
    (bundle / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def remove_checkpoints(folder: Path) -> None:
    """Removes what a training leaves behind beside the weights."""
    for path in [*folder.rglob("checkpoint*"), *folder.rglob("training.png")]:
        path.unlink()
    for path in folder.rglob("training"):
        shutil.rmtree(path)


def make_texts(out: Path) -> None:
    """Trains a language model on sentences of a small grammar."""
    folder = out / "llm"
    train_language_model([sentences()], folder, OPTIONS, LM, QUIET)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=1) + "\n")
    remove_checkpoints(folder)
    print("llm", flush=True)


def make_drafters(out: Path) -> None:
    """Trains a drafter of each kind for the language model."""
    folder = out / "llm"
    tokenizer = TextTokenizer.open(folder).tokenizer
    tokens = encode(tokenizer, [sentences()])
    target = load_language_model(folder)
    for name, make in drafters().items():
        make(target, tokens[:30_000], tokens[-2_000:], out / "drafters" / name)
        print(name, flush=True)
    small = replace(
        LM, hidden_size=24, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=48
    )
    for seed, name in ((0, "draft-one"), (5, "draft-two")):
        recipe = replace(small, schedule=replace(LM.schedule, epochs=6))
        options = replace(OPTIONS, seed=seed)
        train_language_model(
            [sentences()], out / "drafters" / name, options, recipe, QUIET, tokenizer
        )
    remove_checkpoints(out / "drafters")


Make = Callable[[LanguageModel, np.ndarray, np.ndarray, Path], object]


def drafters() -> dict[str, Make]:
    """Returns what trains the drafter in each folder."""
    sizes = {"window": WINDOW, "batch": 16, "validation_rows": 16}

    def eagle(kind: str, **changes: object) -> Make:
        recipe = EagleRecipe(kind, 4, schedule=SMALL, **sizes, **changes)  # type: ignore[arg-type]
        run = train_mtp if kind == "mtp" else train_eagle
        return lambda model, train, valid, folder: run(
            model, train, valid, folder, OPTIONS, recipe, QUIET
        )

    def block(kind: str) -> Make:
        recipe = BlockRecipe(
            kind=kind,  # type: ignore[arg-type]
            layers=1,
            block_size=5,
            rank=8,
            anchors=8,
            schedule=replace(SMALL, epochs=6),
            **sizes,  # type: ignore[arg-type]
        )
        return lambda model, train, valid, folder: train_block(
            model, train, valid, folder, OPTIONS, recipe, QUIET
        )

    medusa = MedusaRecipe(3, schedule=SMALL, **sizes)  # type: ignore[arg-type]
    masks = MaskTokensRecipe(3, 4, 8.0, 12, schedule=SMALL, **sizes)  # type: ignore[arg-type]
    slots = SpecformerRecipe(4, schedule=SMALL, **sizes)  # type: ignore[arg-type]
    return {
        "eagle": eagle("eagle"),
        "eagle3": eagle("eagle3", draft_vocab_size=200),
        "mtp": eagle("mtp"),
        **{kind: block(kind) for kind in ("dflash", "jetspec", "dspark", "dflash2")},
        "medusa": lambda m, a, b, f: train_medusa(m, a, b, f, OPTIONS, medusa, QUIET),
        "mask_tokens": lambda m, a, b, f: train_mask_tokens(m, a, b, f, OPTIONS, masks, QUIET),
        "specformer": lambda m, a, b, f: train_specformer(m, a, b, f, OPTIONS, slots, QUIET),
    }


def sentences(count: int = 9000) -> str:
    """Returns sentences about the items of the catalogue."""
    random = np.random.default_rng(3)
    lines = []
    for _ in range(count):
        topic = str(random.choice(list(TOPICS)))
        thing, other = random.choice(TOPICS[topic], 2, replace=False)
        style, price = random.choice(STYLES), int(random.integers(2, 30))
        lines.append(
            [
                f"The {style} {thing} costs {price} euros.",
                f"A {thing} and a {other} belong in the {topic.lower()}.",
                f"user: Is the {thing} {style}?\nassistant: Yes, the {thing} is {style}.",
                f"Which {thing} is {style}? The {thing} of {topic} house {price % 5}.",
            ][int(random.integers(4))]
        )
    return "\n".join(lines)


if __name__ == "__main__":
    make_all(Path(sys.argv[1]))
