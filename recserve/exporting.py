"""A bundle's recommender as a Hugging Face Llama, with the tokens of every item beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import save_file

from recserve.bundle import Bundle, BundleError
from recserve.models.llama_layout import llama_config, llama_weights
from recserve.models.recommender import load_recommender

CONFIG, WEIGHTS, ITEMS = "config.json", "model.safetensors", "items.parquet"


def export_llama(bundle: Bundle, out: Path | str) -> list[Path]:
    """Write config.json, model.safetensors and items.parquet (item_id, tokens) into `out`.

    A prompt is BOS and the tokens of the history's items, oldest first, at most
    `max_history_items`; an item's score is the sum of full-vocabulary log-softmax over its tokens.
    Raises BundleError without a recommender, or one that is not a plain Llama scored over the whole
    vocabulary; FileExistsError where `out` holds something already.
    """
    if not bundle.has("recommender"):
        raise BundleError(f"{bundle.root}: no recommender was trained; train one first")
    model = load_recommender(bundle.directory("recommender"))
    if model.config.normalization != "vocabulary":
        raise BundleError(
            f"{bundle.root}: scores are normalised over {model.config.normalization}, which a "
            "Llama cannot say; only a recommender trained with --input codes is exported"
        )
    try:
        config, weights = llama_config(model), llama_weights(model)
    except ValueError as error:
        raise BundleError(f"{bundle.root}: {error}") from None
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    catalog = bundle.catalog()
    tokens = catalog.index.codes.astype(np.int32) + np.array(model.config.level_offsets, np.int32)
    lists = pa.FixedSizeListArray.from_arrays(tokens.ravel(), tokens.shape[1])
    table = pa.table({"item_id": catalog.items.ids, "tokens": lists.cast(pa.list_(pa.int32()))})
    pq.write_table(table, folder / ITEMS)
    save_file(
        {name: weight.detach().contiguous() for name, weight in weights.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [folder / name for name in (CONFIG, WEIGHTS, ITEMS)]
