"""Trains the SASRec of RecTools on the split of docs/results/quality.md, as a reference.

RecTools is not a dependency of this project, and its pins do not fit. Give it an environment:

    python3 -m venv rectools
    rectools/bin/pip install 'rectools[torch]==0.13.0' 'torch==2.13.0' pyarrow==21.0.0 rich
    OMP_NUM_THREADS=1 PYTHONPATH=. rectools/bin/python -m benchmarks.recommend.rectools_sasrec \\
        --data DIR --json rectools.json

`--data` is a folder with events.parquet. Training holds out the last two events of each user. The
epoch is chosen by the recall of the last but one, filtered. Then the last event is predicted once,
with the metrics of `recserve evaluate`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel
from rectools.models.nn.transformers.similarity import DistanceSimilarityModule
from torch import Tensor

from recserve.evaluation.accuracy import ranks_of, slate_metrics

CUTOFFS = (5, 10)


class TargetSimilarity(DistanceSimilarityModule):
    """Logits of the same values, without those of padding, which the loss ignores.

    Seven of eight positions are padding. The original gathers their candidates too, and takes more
    than three minutes an epoch on one core.
    """

    def _get_pos_neg_logits(self, session: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
        real = candidates[..., 0] != 0
        logits = session.new_zeros(candidates.shape)
        rows = torch.nn.functional.embedding(candidates[real], items)
        logits[real] = (rows @ session[real].unsqueeze(-1)).squeeze(-1)
        return logits


class BestEpoch(Callback):
    """Keeps the weights of the epoch with the best recall at 10 on validation."""

    def __init__(self) -> None:
        self.best, self.weights, self.history = -1.0, {}, []
        self.began = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Measures recall and NDCG over all items, without those of the history."""
        model = module.torch_model
        model.eval()
        ranks = []
        with torch.no_grad():
            items = model.item_model.get_all_embeddings()
            for batch in module.data_preparator.get_dataloader_val():
                scores = model.encode_sessions(batch, items)[:, -1] @ items.T
                scores[:, 0] = -torch.inf  # the padding
                scores.scatter_(1, batch["x"], -torch.inf)
                ranks.append(ranks_of(scores.topk(10).indices, batch["y"][:, 0]))
        model.train()
        metrics = slate_metrics(np.concatenate(ranks), (10,))
        minutes = (time.process_time() - self.began) / 60
        self.history.append({**metrics, "minutes": round(minutes, 2)})
        print(len(self.history), self.history[-1], flush=True)
        if metrics["recall@10"] > self.best:
            self.best = metrics["recall@10"]
            self.weights = {name: value.clone() for name, value in model.state_dict().items()}


def read(path: Path) -> pd.DataFrame:
    """Returns the events of users with at least three of them, in RecTools' columns."""
    events = pd.read_parquet(path).sort_values(["user_id", "position"], kind="stable")
    events = events[events.groupby("user_id")["item_id"].transform("size") >= 3]
    return pd.DataFrame(
        {
            Columns.User: events["user_id"],
            Columns.Item: events["item_id"],
            Columns.Weight: 1.0,
            # Only the order counts.
            Columns.Datetime: pd.Timestamp("2000-01-01") + pd.to_timedelta(events["position"], "D"),
        }
    )


def last_of_each_user(interactions: pd.DataFrame) -> Any:
    """Returns a mask of the last event of each user."""
    reversed_rank = interactions.groupby(Columns.User).cumcount(ascending=False)
    return (reversed_rank == 0).to_numpy()


def evaluate(model: SASRecModel, known: pd.DataFrame, held: pd.DataFrame) -> dict[str, Any]:
    """Returns the metrics of the held-out events, kept and filtered."""
    users = held[Columns.User].to_numpy()
    numbers = {item: row for row, item in enumerate(pd.unique(held[Columns.Item]))}
    wanted = held[Columns.Item].map(numbers).to_numpy()
    place = {user: row for row, user in enumerate(users)}
    columns = {}
    for name, filtered in (("kept", False), ("filtered", True)):
        slates = np.full((len(users), max(CUTOFFS)), -1)
        found = model.recommend(users, Dataset.construct(known), max(CUTOFFS), filtered)
        rows, ranks = found[Columns.User].map(place), found[Columns.Rank] - 1
        slates[rows, ranks] = found[Columns.Item].map(numbers).fillna(-1)
        columns[name] = slate_metrics(ranks_of(slates, wanted), CUTOFFS)
    return columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with events.parquet")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    parser.add_argument("--epochs", type=int, default=20, help="number of epochs")
    parser.add_argument("--size", type=int, default=128, help="size of the embeddings")
    parser.add_argument("--negatives", type=int, default=64, help="sampled items of each target")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    given = parser.parse_args()
    seed_everything(given.seed)

    def trainer() -> Trainer:
        return Trainer(
            max_epochs=given.epochs,
            callbacks=[BestEpoch()],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            limit_val_batches=0,
        )

    events = read(given.data / "events.parquet")
    is_last = last_of_each_user(events)
    model = SASRecModel(
        n_blocks=1,
        n_heads=1,
        n_factors=given.size,
        dropout_rate=0.2,
        session_max_len=50,
        loss="sampled_softmax",
        n_negatives=given.negatives,
        lr=1e-3,
        batch_size=128,
        get_val_mask_func=last_of_each_user,
        get_trainer_func=trainer,
        similarity_module_type=TargetSimilarity,
    )
    model.fit(Dataset.construct(events[~is_last]))
    # RecTools trains with a copy of the trainer and its callbacks.
    (best,) = (c for c in model.fit_trainer.callbacks if isinstance(c, BestEpoch))
    model.torch_model.load_state_dict(best.weights)
    columns = evaluate(model, events[~is_last], events[is_last])
    report = {"options": {**vars(given), "data": given.data.name}, "validation": best.history}
    report |= {"test": columns, "threads": torch.get_num_threads()}
    text = json.dumps(report, indent=1, default=str)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
