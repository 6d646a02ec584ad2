"""What an estimate of the softmax over items costs in quality, where the whole one can be computed.

    OMP_NUM_THREADS=1 python -m benchmarks.recommend.sampled_softmax --data DIR --max-minutes 10

Catalogues of more than four times `dense_negatives` items train with a sample of the items, whose
share is a quarter at most. Each run has the same processor time, seed and data, and another number
of sampled items; `--negatives 16384` is the whole softmax of a small catalogue. Prints the figures
of the dense head alone, which is what the sample trains.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.training.options import TrainOptions
from recserve.training.recommender.recommender import ITEMS, train_recommender


def main() -> None:
    """Trains and evaluates once per number of sampled items."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="items.parquet, events.parquet")
    parser.add_argument("--negatives", type=int, nargs="+", default=[16_384, 3000, 190])
    parser.add_argument("--max-minutes", type=float, default=10, help="of the processor, each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for negatives in args.negatives:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "bundle"
            files = (args.data / "items.parquet", args.data / "events.parquet")
            built = build_bundle(BuildOptions(*files, out), log=lambda line: None)
            bundle = Bundle.open(out)
            objective = replace(ITEMS.objective, dense_negatives=negatives)
            options = TrainOptions(
                max_minutes=args.max_minutes, clock="processor", seed=args.seed, device="cpu"
            )
            report = train_recommender(bundle, options, replace(ITEMS, objective=objective))
            is_sampled = built.num_items > 4 * negatives
            name = f"{negatives} sampled items" if is_sampled else "all items"
            found = evaluate_bundle(bundle, EvaluationOptions(strategy="dense_head"))
            print(f"{name}, {report.epochs} epochs", flush=True)
            for column in found.columns:
                cells = [one.replace("\n", " (") + ")" for one in found.cells(column)]
                names = found.columns[column]
                shown = "  ".join(map(" ".join, zip(names, cells, strict=True)))
                print(f"  {column}: {shown}", flush=True)


if __name__ == "__main__":
    main()
