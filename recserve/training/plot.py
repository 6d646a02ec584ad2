"""Plot of a training run."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recserve.training.options import EpochRecord


def save_plot(history: list[EpochRecord], selection: str, path: Path) -> None:
    """Writes a PNG with two panels over epochs: all losses, and the selection metric."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [record.epoch for record in history]
    losses, metric = figure.subplots(1, 2)
    for name in history[0].losses if history else ():
        losses.plot(epochs, [record.losses[name] for record in history], marker="o", label=name)
    losses.set(xlabel="epoch", ylabel="loss per target")
    if history:
        losses.legend()
    values = [record.metrics[selection] for record in history]
    metric.plot(epochs, values, marker="o", color="tab:green")
    metric.set(xlabel="epoch", ylabel=f"validation {selection}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
