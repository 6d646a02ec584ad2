"""Exports a bundle's recommender as a Hugging Face Llama, with the tokens of every item."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.bundle.bundle import Bundle, BundleError
from recserve.files import new_folder
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.prefix_template import BOS
from recserve.models.recommender import Recommender, load_recommender
from recserve.models.saving import save_language_model

CONFIG, WEIGHTS, ITEMS = "config.json", "model.safetensors", "items.parquet"


def export_llama(bundle: Bundle, out: Path | str) -> list[Path]:
    """Writes config.json, model.safetensors and items.parquet (item_id, tokens).

    A prompt is BOS followed by the tokens of at most `max_history_items` items, oldest first. An
    item's score is the sum of the full-vocabulary log-softmax over its tokens. Level heads, which
    only `rpg` reads, are left out. A failed export leaves nothing behind.

    Args:
        bundle: Bundle with a trained recommender.
        out: New or empty folder.

    Returns:
        Paths of the three files.

    Raises:
        BundleError: If there is no recommender, or it is not a plain Llama that is scored over the
            whole vocabulary.
        FileExistsError: If `out` is not empty.
    """
    if not bundle.has("recommender"):
        raise BundleError(f"{bundle.root}: no recommender was trained; train one first")
    model = load_recommender(bundle.directory("recommender"))
    if model.config.normalization != "vocabulary":
        raise BundleError(
            f"{bundle.root}: scores are normalised over {model.config.normalization}, which a "
            "Llama cannot express; train a recommender with --input codes to export it"
        )
    if model.config.input != "codes":
        raise BundleError(
            f"{bundle.root}: this recommender reads item vectors or ids, which a Llama cannot "
            "read; train one with --input codes"
        )
    if not model.config.autoregressive:
        raise BundleError(
            f"{bundle.root}: this recommender predicts all codes at once, which a Llama cannot do; "
            "train one with --input codes"
        )
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty; choose a new folder")
    catalog = bundle.catalog()
    tokens = catalog.semantic_ids.codes.astype(np.int32) + np.array(
        model.config.level_offsets, np.int32
    )
    lists = pa.FixedSizeListArray.from_arrays(tokens.ravel(), tokens.shape[1])
    table = pa.table({"item_id": catalog.items.ids, "tokens": lists.cast(pa.list_(pa.int32()))})
    with new_folder(out) as folder:
        pq.write_table(table, folder / ITEMS)
        save_language_model(as_language_model(model), folder)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config["max_history_items"] = model.config.max_history_items
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return [out / name for name in (CONFIG, WEIGHTS, ITEMS)]


def as_language_model(model: Recommender) -> LanguageModel:
    """Returns a recommender of `codes` input as a language model over BOS and code tokens.

    The two models share their weights.

    Raises:
        ValueError: If the model reads more than tokens.
    """
    c = model.config
    if c.input != "codes":
        raise ValueError(f"input is {c.input!r}; only a 'codes' model is a plain language model")
    text = LanguageModel(LanguageModelConfig(c.decoder, c.num_code_tokens, c.tied, BOS))
    text.tokens, text.decoder = model.tokens, model.decoder
    if not c.tied:
        text.head = model.head
    return text
